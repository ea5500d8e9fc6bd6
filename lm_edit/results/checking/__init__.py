"""Checks and merging of result files, and the results repository."""
