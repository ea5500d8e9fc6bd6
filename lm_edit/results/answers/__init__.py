"""Answers of runs: samples, cases, verdicts and scores computed again."""
