"""The `lm-edit` application: edits, statistics, tuning, saved results and figures outside of evaluations."""
