"""QAEdit: edits of questions that models answer wrongly, under the synthetic and the WILD evaluation. See README.md."""
