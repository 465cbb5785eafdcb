"""Metadata of variable batches (VBE) for FBGEMM's CUDA kernels, with one copy to the device.

FBGEMM's own code (1.6 to 1.9) calls 26 operators and copies three tensors from pageable memory per
lookup. This module replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn


class _VariableBatches(SplitTableBatchedEmbeddingBagsCodegen):
    def _generate_vbe_metadata(
        self, offsets: Any, batch_size_per_feature_per_rank: Any, *output: Any
    ) -> Any:
        metadata = super()._generate_vbe_metadata(offsets, None)
        if (sizes := batch_size_per_feature_per_rank) is None:
            return metadata
        dims = [self.dims[table] for table in self.feature_table_map]
        by_rank = [n * dim for rank in zip(*sizes) for n, dim in zip(rank, dims)]  # noqa: B905
        outputs = np.array([*accumulate(by_rank, initial=0)], np.int64).view(np.int32)
        batches = [*accumulate(map(sum, sizes), initial=0)]
        ranks = [n for of_feature in sizes for n in accumulate(of_feature, initial=0)]
        made = torch.from_numpy(np.concatenate([outputs, np.array(batches + ranks, np.int32)]))
        sent = made.pin_memory().to(self.current_device, non_blocking=True)
        of_output, of_batch, of_rank = torch.split(sent, [len(outputs), len(batches), len(ranks)])
        return metadata._replace(
            B_offsets=of_batch,
            output_offsets_feature_rank=of_output.view(torch.int64),
            B_offsets_rank_per_feature=of_rank.view(len(sizes), -1),
            max_B=max(map(sum, sizes)),
            max_B_feature_rank=max(map(max, sizes)),
            output_size=sum(by_rank),
            **dict(zip(("vbe_output", "vbe_output_offsets"), output, strict=False)),
        )


def copy_metadata_once(lookups: Iterable[nn.Module]) -> None:
    """Make FBGEMM's lookups compute VBE metadata with one copy. Changes the modules in place."""
    for module in (module for lookup in lookups for module in lookup.modules()):
        if type(module) is SplitTableBatchedEmbeddingBagsCodegen and not module.is_nobag:
            module.__class__ = _VariableBatches
