"""Training on rows that leave the loss when they are learned, beside prompts whose next token must not change."""
