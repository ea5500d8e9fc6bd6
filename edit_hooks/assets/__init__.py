"""Models that come as packages: the demo model and the sentence embedder."""
