"""Search over settings of an editor on held-out facts."""
