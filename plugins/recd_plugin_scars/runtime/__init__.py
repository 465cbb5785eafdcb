"""Embedding kernels that cache frequent rows of tables in host memory or files.

Import submodules directly, because the process that launches the ranks must not import torch.
"""
