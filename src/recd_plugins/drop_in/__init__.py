"""Deduplication and sharders for your own model, data loader and training loop."""
