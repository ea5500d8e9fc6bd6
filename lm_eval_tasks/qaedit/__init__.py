"""QAEdit: edits of questions the model answers wrongly, synthetic and WILD evaluation. See README.md."""
