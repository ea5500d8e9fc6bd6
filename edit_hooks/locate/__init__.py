"""The locate-then-edit engine: keys, value optimization, second moments, solves, causal tracing."""
