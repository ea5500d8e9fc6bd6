"""WikiBigEdit: facts of Wikidata that changed, month by month."""
