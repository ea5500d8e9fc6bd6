"""The self-check of a model before its first edit: probes on a few tokens, and what they allow."""
