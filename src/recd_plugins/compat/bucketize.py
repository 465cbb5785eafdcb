"""Bucketizes the ids of row-wise tables without waiting for a GPU.

For variable batches (VBE), TorchRec (1.6 to 1.9) copies the number of rows per feature from
pageable memory, so the host waits for the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torchrec.distributed import embedding_sharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sharding.coalesced.input_dist import numbers_on


@contextmanager
def pinned_strides() -> Iterator[None]:
    """Copy the number of rows per feature from pinned memory in this context."""
    before = embedding_sharding._fx_wrap_batch_size_per_feature
    embedding_sharding._fx_wrap_batch_size_per_feature = _strides
    try:
        yield
    finally:
        embedding_sharding._fx_wrap_batch_size_per_feature = before


def _strides(features: KeyedJaggedTensor) -> Tensor | None:
    if not features.variable_stride_per_key():
        return None
    dtype = features.lengths().dtype
    return numbers_on(features.device(), features.stride_per_key(), dtype=dtype)[0]
