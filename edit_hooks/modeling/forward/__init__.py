"""Forward passes: caches, heads, losses, positions, sampled text."""
