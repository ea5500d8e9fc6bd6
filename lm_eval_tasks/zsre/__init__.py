"""ZsRE: edited answers to questions of zero-shot relation extraction, in three flavors."""
