"""Deduplication and sharders for a trainer's own model and loader."""
