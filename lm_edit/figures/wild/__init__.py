"""Figures of QAEdit: synthetic against free answers."""
