"""Effects of edits on a model: damage elsewhere, hidden states, next-token distributions."""
