"""The table that lm-eval prints, and warnings below it."""
