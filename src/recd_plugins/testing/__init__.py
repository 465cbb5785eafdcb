"""Tests and benchmarks of plugins: contracts by kind, ranks, figures, stores that count reads."""
