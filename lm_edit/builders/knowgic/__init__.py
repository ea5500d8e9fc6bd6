"""Graphs of facts and their implication chains, as ThinkEdit grows them."""
