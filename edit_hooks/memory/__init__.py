"""Hook kinds: codebooks, side memories, adapter databases and gated predictors."""
