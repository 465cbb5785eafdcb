"""Locality of embedding lookups: profiles of traces, and synthetic traces (arXiv 1906.00091).

The trace of a table is the sequence of ids in its lookups. The LRU stack distance of an access is
the number of distinct ids since the last access to its id, itself included, or 0 for a new id. An
LRU cache of C rows hits if the distance is 1 to C.
"""
