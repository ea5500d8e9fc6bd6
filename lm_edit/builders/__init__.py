"""Data sets that are made with a writer model or from public tables."""
