"""The model judge, its stored verdicts, the writer, and both from settings."""
