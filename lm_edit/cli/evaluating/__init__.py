"""Verbs that run evaluations and read their results."""
