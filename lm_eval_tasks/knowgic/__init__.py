"""KnowGIC: implication chains around an edited fact."""
