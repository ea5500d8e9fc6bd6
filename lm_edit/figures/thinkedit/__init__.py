"""Figures of ThinkEdit and KnowGIC."""
