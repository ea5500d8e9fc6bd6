"""Memory and time of edits of a model, from its configuration, before any weight is loaded."""
