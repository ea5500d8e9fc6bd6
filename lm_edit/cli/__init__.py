"""The verbs of `lm-edit`; they read arguments and print."""
