"""Scores of single cases and the 95% intervals of scores: one rule for tables, figures and the leaderboard."""
