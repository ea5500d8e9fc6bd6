"""Saved samples of lm-eval: reading them and judging them again."""
