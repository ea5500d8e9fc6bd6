"""The model judge, its stored verdicts, and judges from settings."""
