"""Verbs that edit models and prepare edits."""
