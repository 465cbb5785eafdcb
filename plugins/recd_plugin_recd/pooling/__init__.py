"""Poolings: a sequence of embeddings to one vector a row."""
