"""KnowEdit: edits with questions about their consequences. See README.md."""
