"""Value optimization: rows of an edit, forward passes over them, targets."""
