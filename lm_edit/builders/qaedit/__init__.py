"""Records of QAEdit from question-answering data."""
