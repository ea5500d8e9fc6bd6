"""What a stream of closed-form edits carries from step to step."""
