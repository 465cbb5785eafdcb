"""Jagged tensors that store duplicate rows once, and functions that find duplicate rows."""
