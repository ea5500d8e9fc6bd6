"""Documents, scorers and published filters by protocol, for any benchmark."""
