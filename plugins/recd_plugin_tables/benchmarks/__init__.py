"""Benchmarks of tables: modules that ``recd bench`` runs."""
