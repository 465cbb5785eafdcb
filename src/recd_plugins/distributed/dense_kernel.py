"""An unpooled lookup with dense gradients that is right on CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.torchrec_internals import require_attributes


class PortableDenseEmbedding(BatchedDenseEmbedding):
    """TorchRec's dense kernel, looked up by ``torch.nn.functional.embedding``.

    FBGEMM's dense kernel (1.6 to 1.9) ignores ``PoolingMode.NONE`` on CPU: it sums each row's
    embeddings. Parameters and state dict are those of the base class.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Embeddings of the ids, ``[num_values, embedding_dim]``, in the order of the features."""
        device = features.values().device
        first_row = torch.tensor([0, *self._local_rows[:-1]], device=device).cumsum(0)
        table_of_feature = torch.tensor(self._feature_table_map, device=device)
        ids_per_feature = torch.tensor(features.length_per_key(), device=device)
        rows = features.values().long() + first_row[table_of_feature].repeat_interleave(
            ids_per_feature
        )
        return F.embedding(rows, self._emb_module.weights.view(-1, self._local_cols[0]))


def use_portable_dense_kernels(lookups: Iterable[nn.Module]) -> None:
    """Make every unpooled dense kernel in ``lookups`` a PortableDenseEmbedding, in place.

    The class is changed and not the object: optimizers, DDP and state dicts already hold its
    parameters.

    Raises:
        SetupError: TorchRec's kernel has other internals than 1.6 to 1.9.
    """
    for lookup in lookups:
        for kernel in lookup.modules():
            if type(kernel) is not BatchedDenseEmbedding:
                continue
            # Private, torchrec 1.6 to 1.9: sizes of the tables in one flat weight; there is no
            # public way to make a kernel of one's own.
            require_attributes(
                kernel, "_local_rows", "_local_cols", "_feature_table_map", "_emb_module"
            )
            widths = set(vars(kernel)["_local_cols"])
            assert len(widths) == 1, "tables of one EmbeddingCollection are equally wide"
            kernel.__class__ = PortableDenseEmbedding
