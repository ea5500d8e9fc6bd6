"""Shared by all benchmarks: records, cases and probes, scoring, aggregation, and the task class."""
