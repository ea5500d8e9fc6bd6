"""Causal tracing."""
