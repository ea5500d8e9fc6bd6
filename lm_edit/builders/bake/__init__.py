"""Records of BAKE from facts and Wikidata."""
