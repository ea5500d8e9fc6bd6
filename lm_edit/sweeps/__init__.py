"""Sweeps: a plan of models, editors, benchmarks and settings, executed as runs of ``lm_eval``."""
