"""Sharders for TorchRec modules, coalescing, gradient deduplication and train pipelines."""
