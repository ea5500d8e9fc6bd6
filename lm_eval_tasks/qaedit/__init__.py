"""QAEdit: edits that give questions their true answer."""
