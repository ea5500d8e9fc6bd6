"""Verbs that build data sets."""
