"""Coalescing of lookups: each rank sends each distinct id of a table only once per batch."""
