"""Exact sharders of TorchRec's modules, coalescing, gradient deduplication and train pipelines."""
