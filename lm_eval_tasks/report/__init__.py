"""The facts that a run records about itself, and the table that it prints."""
