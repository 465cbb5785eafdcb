"""Embedding tables with hot rows in fast memory and all rows in slow memory.

Modules are imported individually because the process that launches the ranks does not need torch.
"""
