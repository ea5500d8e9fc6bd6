"""Evaluation protocols that any benchmark can use: documents, scorers and published filters by protocol."""
