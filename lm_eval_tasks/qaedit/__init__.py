"""QAEdit: edits of questions that models answer wrongly. See README.md."""
