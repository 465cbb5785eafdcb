"""Coalescing: each rank sends each distinct id of a table once per batch."""
