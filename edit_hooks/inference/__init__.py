"""Scoring and greedy decoding of batches whose rows can have different edits."""
