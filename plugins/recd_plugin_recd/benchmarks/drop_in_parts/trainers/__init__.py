"""Trainers in the shape of those that there are, with torch and TorchRec alone.

NAME.diff puts three lines into NAME.py, and an import.

``build(size, rows_per_session)`` is called on every rank and makes a ``Trainer``.
"""
