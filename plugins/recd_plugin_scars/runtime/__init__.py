"""Embedding tables with hot rows in fast memory and the others in a slow one.

The modules of this package are imported one by one, as the parent of the ranks needs no torch.
"""
