"""Embedding tables whose hot rows are in fast memory and whose others are in a slow one.

The modules of this package are imported one by one, as the parent of the ranks needs no torch.
"""
