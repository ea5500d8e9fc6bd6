"""Hook kinds: codebooks, side memories and adapter databases."""
