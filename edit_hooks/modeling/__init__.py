"""Models and tokenizers as editors see them: module names, hooks, tokens, sampling, attention."""
