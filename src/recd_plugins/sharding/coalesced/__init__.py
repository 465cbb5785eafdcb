"""Coalescing: each id of a table is sent, and each embedding returned, once a batch and rank."""
