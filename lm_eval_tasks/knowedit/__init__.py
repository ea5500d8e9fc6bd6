"""KnowEdit: edits with questions about their consequences."""
