"""QAEdit: edits that give questions their true answer. See README.md."""
