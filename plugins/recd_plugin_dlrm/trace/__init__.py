"""Traces of ids: profiles of their locality, and synthetic traces with the same (arXiv 1906.00091).

A table's trace is the ids that it is looked up with, in order. Its locality is the distribution of
LRU stack distances: how many distinct ids were seen since an id was seen last, itself counted, or 0
where it is new. An LRU cache of C rows hits wherever the distance is 1 to C.
"""
