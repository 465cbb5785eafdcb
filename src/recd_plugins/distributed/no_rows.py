"""Batches without rows, which a rank may have at the end of its data.

TorchRec (1.6 to 1.9) divides by the number of rows of sequences and of deduplicated bags, so such a
batch gets an empty row on its way in, and what comes out loses it.
"""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def num_rows(features: KeyedJaggedTensor) -> int:
    """Rows of the batch, all of them where they are deduplicated."""
    indices = features.inverse_indices_or_none()
    return features.stride() if indices is None else indices[1].shape[1]


def with_an_empty_row(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """One empty row for each feature of a batch without rows, in its form."""
    keys, indices = features.keys(), features.inverse_indices_or_none()
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().new_zeros(len(keys)),
        stride=None if variable else 1,
        stride_per_key_per_rank=[[1]] * len(keys) if variable else None,
        inverse_indices=indices and (indices[0], indices[1].new_zeros(len(keys), 1)),
    )


def pooled_without_rows(embeddings: KeyedTensor) -> KeyedTensor:
    """What comes out of bags, without the empty row."""
    return KeyedTensor(
        keys=embeddings.keys(),
        length_per_key=embeddings.length_per_key(),
        values=embeddings.values()[:0],
    )


def without_rows(embeddings: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """What comes out of sequences, without the empty row."""
    return {
        name: JaggedTensor(
            rows.values(), weights=rows.weights_or_none(), lengths=rows.lengths()[:0]
        )
        for name, rows in embeddings.items()
    }
