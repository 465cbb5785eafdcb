"""Benchmarks that produce the figures quoted in the documentation: ``python -m benchmarks``."""
