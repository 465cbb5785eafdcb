"""KeyedJaggedTensors with equal rows of a feature stored once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.lower import StoredFeature, variable_batch_kjt
from recd_plugins.errors import DataError
from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.sparse.deduplicated_kjt import DeduplicatedKJT
from recd_plugins.sparse.unique_groups import deduplicate, kernels_can_read


class Stored:
    """What replaces the KeyedJaggedTensors of a batch, and keeps working memory between batches.

    Not to be shared by threads.

    Args:
        features: of each KeyedJaggedTensor that changes, by its place in the batch: those in which
            equal rows are looked for.

    Raises:
        DataError: when called: a KeyedJaggedTensor has other values than its lengths say.
    """

    def __init__(self, features: Mapping[str, Collection[str]]) -> None:
        self._features = features
        self._deduplicators = {path: Deduplicator() for path in features}

    def __call__(self, path: str, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        chosen = self._features.get(path)
        # The trainer has deduplicated it already, or called dedup twice.
        if chosen is None or kjt.variable_stride_per_key() or isinstance(kjt, DeduplicatedKJT):
            return kjt
        check_lengths(path, kjt)
        if kjt.stride() and kjt.weights_or_none() is None and kernels_can_read(kjt):
            unique = _by_kernel(kjt, chosen, self._deduplicators[path])
        else:
            unique = _by_groups(kjt, chosen)
        return DeduplicatedKJT(unique, kjt)


def check_lengths(path: str, kjt: KeyedJaggedTensor) -> None:
    """Refuse other values than lengths say; ``path`` is where they are, for the message."""
    if (ids := int(kjt.offsets()[-1])) != kjt.values().numel():
        raise DataError(
            f"{path}: lengths add up to {ids} ids, and there are {kjt.values().numel()} values"
        )


def _by_kernel(
    kjt: KeyedJaggedTensor, chosen: Collection[str], deduplicator: Deduplicator
) -> KeyedJaggedTensor:
    """As ``_by_groups``, of all features at once: Python for each would take most of the time."""
    keys, num_rows = kjt.keys(), kjt.stride()
    positions = [position for position, key in enumerate(keys) if key in chosen]
    found = deduplicator.each(
        kjt.values().numpy(), kjt.offsets().numpy(), np.array(positions), num_rows
    )
    # In memory of torch's, which a pipeline with clear_data_dist_inputs frees when they are sent.
    values = torch.tensor(found.values)
    lengths = torch.tensor(found.lengths, dtype=kjt.lengths().dtype)
    inverse, rows, sizes = torch.from_numpy(found.inverse_lookup), found.num_unique, found.sizes
    if len(positions) < len(keys):
        sizes_of_all, rows_of_all = kjt.length_per_key(), [num_rows] * len(keys)
        all_values = list(torch.split(kjt.values(), sizes_of_all))
        all_lengths = list(torch.split(kjt.lengths(), num_rows))
        sizes_of_all = list(sizes_of_all)
        for position, some_values, some_lengths in zip(
            positions, torch.split(values, sizes), torch.split(lengths, rows), strict=True
        ):
            all_values[position], all_lengths[position] = some_values, some_lengths
            sizes_of_all[position], rows_of_all[position] = len(some_values), len(some_lengths)
        values, lengths = torch.cat(all_values), torch.cat(all_lengths)
        every_row = torch.arange(num_rows).repeat(len(keys), 1)
        every_row[positions] = inverse
        inverse, rows, sizes = every_row, rows_of_all, sizes_of_all
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        stride_per_key_per_rank=[[count] for count in rows],
        length_per_key=sizes,
        inverse_indices=(keys, inverse),
    )


def _by_groups(kjt: KeyedJaggedTensor, chosen: Collection[str]) -> KeyedJaggedTensor:
    # TorchRec's to_dict fails where there is no row.
    names = [key for key in kjt.keys() if key in chosen or not kjt.stride()]  # noqa: SIM118
    features = {}
    if len(names) < len(kjt.keys()):
        for name, jagged in kjt.to_dict().items():
            features[name] = StoredFeature(jagged, kjt.stride(), None)
    found = deduplicate(kjt, [[name] for name in names])
    for name, unique in zip(names, found, strict=True):
        rows = JaggedTensor(unique.values, unique.weights, unique.lengths)
        features[name] = StoredFeature(rows, unique.lengths.numel(), unique.inverse_lookup)
    stored = variable_batch_kjt(kjt.keys(), features, kjt.stride())
    assert stored is not None, "it has features"
    return stored
