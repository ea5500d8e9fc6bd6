"""Scores of answers, and columns over cases."""
