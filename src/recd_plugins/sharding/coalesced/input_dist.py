"""Coalesces ids before the input dist: each distinct id of a table is sent once per batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.coalesced.kernels import number_rows


@dataclass(frozen=True)
class FeatureGroups:
    """Features of a module, grouped by the coalesced table that they look up.

    The ids of a group are deduplicated together and sent as one feature, the carrier, which is the
    group's first feature. ``others`` are the features of tables without coalescing.
    """

    groups: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]

    @property
    def coalesced(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def keys(self) -> list[str]:
        return [*self.coalesced, *self.others]

    @property
    def carriers(self) -> dict[str, str]:
        """Return a dict from coalesced feature to its carrier, which sends the group's ids."""
        return {name: group[0] for group in self.groups for name in group}


def feature_groups(
    configs: Sequence[BaseEmbeddingConfig], coalesced: Collection[str]
) -> FeatureGroups | None:
    """Group features by coalesced table (distinct ids sent once); None if no table is coalesced.

    Raises:
        SetupError: a feature looks up both coalesced and other tables, looks up one table twice, or
            has a name that contains "@".
    """
    tables: dict[str, list[str]] = {}
    for config in configs:
        for feature in config.feature_names:
            tables.setdefault(feature, []).append(config.name)
    groups: dict[tuple[str, ...], list[str]] = {}
    others = []
    for feature, names in tables.items():
        chosen = [name for name in names if name in coalesced]
        if chosen and len(chosen) < len(names):
            raise SetupError(
                f"feature {feature!r} looks up the tables {', '.join(map(repr, names))}, but only "
                f"{', '.join(map(repr, chosen))} are coalesced. Coalesce all of them or none."
            )
        if len({*chosen}) < len(chosen):
            raise SetupError(f"table {chosen[0]!r} lists feature {feature!r} twice. List it once.")
        if chosen:
            groups.setdefault(tuple(names), []).append(feature)
        else:
            others.append(feature)
    if not groups:
        return None
    refuse_at_signs(tables, "a table of the module is coalesced")
    return FeatureGroups(tuple(map(tuple, groups.values())), tuple(others))


def check_coalesced(
    coalesced: Collection[str],
    shardings: Mapping[str, ParameterSharding],
    clipped: Collection[str],
    *,
    pooled: bool,
) -> None:
    """Raise SetupError if a coalesced table has an unsupported kernel or optimizer.

    Coalescing sends each distinct id once. Data-parallel tables send no ids, dense kernels do not
    support variable batches (VBE), and gradient clipping would clip the sum of several gradients.
    """
    names = [name for name in shardings if name in coalesced]
    for name, sharding in shardings.items():
        dense = (
            sharding.sharding_type == ShardingType.DATA_PARALLEL.value
            or sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        )
        if names and dense and (pooled or name in coalesced):
            raise SetupError(
                f"table {name!r} is data-parallel or has the dense kernel, which coalescing does "
                f"not support. Remove the coalesce entry of table {names[0]!r}, or shard {name!r} "
                "another way with a fused kernel."
            )
        if name in coalesced and name in clipped:
            raise SetupError(
                f"table {name!r} is coalesced and has gradient_clipping, which would clip sums of "
                "gradients. Remove coalescing or gradient_clipping for the table."
            )


def refuse_at_signs(features: Iterable[str], what: str) -> None:
    """Raise SetupError if a feature name contains "@"; the message quotes the reason ``what``.

    TorchRec (1.6 to 1.9) cuts feature names at the first "@".
    """
    if found := sorted({name for name in features if "@" in name}):
        raise SetupError(
            f"feature names {shortened(found)} contain '@', but {what}, and TorchRec would cut "
            "these names at '@'. Rename the features."
        )


class Unique(NamedTuple):
    """Distinct ids of consecutive segments of a tensor of ids.

    Attributes:
        ids: the distinct ids of each segment; in order of occurrence on CPU, sorted elsewhere.
        counts: number of distinct ids of each segment.
        inverse: int64 ``[n]``, index in ``ids`` of each id.
    """

    ids: Tensor
    counts: list[int]
    inverse: Tensor

    @property
    def first(self) -> list[int]:
        """Return the index in ``ids`` of each segment's first distinct id."""
        return [0, *accumulate(self.counts)][:-1]


def unique_ids(ids: Tensor, sizes: Sequence[int]) -> Unique:
    """Return the distinct ids of each segment of ``ids``, int32 or int64 ``[n]``.

    ``sizes`` are the lengths of the segments and add up to n. Ids may be out of a table's range.
    """
    return _by_hash(ids, sizes) if ids.device.type == "cpu" else by_sorting(ids, sizes)


def _by_hash(ids: Tensor, sizes: Sequence[int]) -> Unique:
    unique, inverse = torch.empty_like(ids), torch.empty(len(ids), dtype=torch.int64)
    slots = np.empty(1 << (2 * max(1, *sizes) - 1).bit_length(), np.int32)
    given, distinct = ids.contiguous().numpy()[:, None], unique.numpy()[:, None]
    counts, start, first = list[int](), 0, 0
    for size in sizes:
        end = start + size
        # Use only as many slots as this segment needs, so that clearing them stays cheap.
        own, numbers = slots[: 1 << (2 * size - 1).bit_length()], inverse.numpy()[start:end]
        counts.append(int(number_rows(given[start:end], own, numbers, distinct[first:])))
        numbers += first
        start, first = end, first + counts[-1]
    return Unique(unique[:first], counts, inverse)


def by_sorting(ids: Tensor, sizes: Sequence[int]) -> Unique:
    """Compute ``unique_ids`` on any device with one sort and one device synchronization.

    The highest bits of a sort key are the segment. Ids that need more than the other bits, and so
    are in no table, may count as equal.
    """
    if not len(ids):
        return Unique(ids, [0] * len(sizes), ids.long())
    starts, size = [0, *accumulate(sizes)], len(ids)
    rows, lengths = numbers_on(ids.device, [min(n, size - 1) for n in starts], [*sizes, 0])
    segments = torch.repeat_interleave(lengths, output_size=size)
    bits = 62 - len(sizes).bit_length()
    keys = ids if ids.dtype == torch.int32 else ids.clamp(-1 << bits, (1 << bits) - 1)
    keys, order = torch.sort(torch.add(keys, segments, alpha=2 << bits), stable=True)
    differ = torch.ne(keys[1:], keys[:-1], out=torch.empty_like(order[1:]))
    number = torch.ops.fbgemm.asynchronous_complete_cumsum(differ)
    inverse = torch.empty_like(order).scatter_(0, order, number)
    found: list[int] = number.index_select(0, rows).tolist()
    # Empty segments at the end have the number of the last row.
    ends = [n if start < size else found[-1] + 1 for n, start in zip(found, starts, strict=True)]
    # A mask as index would wait for the device a second time.
    unique = ids.new_empty(ends[-1]).scatter_(0, inverse, ids)
    return Unique(unique, [end - start for start, end in pairwise(ends)], inverse)


def numbers_on(
    device: torch.device, *numbers: Sequence[int], dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return n lists of equal length as a tensor ``[n, length]``, without a device wait."""
    made = torch.tensor(numbers, dtype=dtype)
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Coalesced:
    """Data of a batch whose ids were coalesced, to expand embeddings of distinct ids to all ids.

    The data stays on this rank.

    Attributes:
        inverse: dict from coalesced feature to int64 indices, the embedding row of each id.
        lengths: dict from feature to the number of ids per row.
        ids: dict from feature to its ids before deduplication.
        weights: dict from feature to float32 weights; empty if the batch has none.
        inverse_indices: dict from feature to int64 ``[B]``; empty for a plain batch.
        num_rows: B, the number of output rows.
        first: dict from coalesced feature to the index in ``inverse`` of its table's first row.
    """

    inverse: dict[str, Tensor]
    lengths: dict[str, Tensor]
    ids: dict[str, Tensor]
    weights: dict[str, Tensor]
    inverse_indices: dict[str, Tensor]
    num_rows: int
    first: dict[str, int] = field(default_factory=dict)

    def record_stream(self, stream: torch.Stream) -> None:
        """Record that ``stream`` uses these tensors, as ``Tensor.record_stream`` does."""
        for tensors in (self.inverse, self.lengths, self.ids, self.weights, self.inverse_indices):
            for tensor in tensors.values():
                tensor.record_stream(stream)


def coalesce_sequences(
    features: KeyedJaggedTensor, groups: FeatureGroups
) -> tuple[KeyedJaggedTensor, Coalesced]:
    """Replace the ids of a plain EmbeddingCollection batch by the distinct ids per table.

    The first feature of each group (the carrier) has all distinct ids of the group in its first
    row. The other features of the group are empty. If all tables are coalesced, the batch has one
    row. Return the batch to send, and the local data to expand its embeddings.
    """
    batch, ids, num_ids = _coalesce(features, groups)
    counts = num_ids[: len(groups.coalesced)]
    rows = features.stride() if groups.others else 1
    first = numbers_on(ids.device, counts, dtype=features.lengths().dtype).T
    lengths = first[:, :rows]
    if rows > 1:
        lengths = torch.cat([first, first.new_zeros(len(counts), rows - 1)], dim=1)
    unique = KeyedJaggedTensor(
        keys=groups.keys,
        values=_with_others(ids, batch.ids, groups),
        lengths=_with_others(lengths.flatten(), batch.lengths, groups),
        stride=rows,
        length_per_key=num_ids,
    )
    return unique, batch


def coalesce_bags(
    features: KeyedJaggedTensor, groups: FeatureGroups
) -> tuple[KeyedJaggedTensor, Coalesced]:
    """Replace the ids of an EmbeddingBagCollection batch by the distinct ids per table.

    The result has variable batch sizes (VBE). The first feature of each group (the carrier) has one
    row per distinct id. The other features of the group have no rows. The inverse indices are
    empty, so TorchRec does not expand the rows.

    FBGEMM's CUDA kernels (1.6 to 1.9) divide by the mean number of rows per feature, rounded down.
    On CUDA, features without rows therefore get an empty row if their group has fewer ids than
    features.

    Returns:
        The batch to send, and the local data to expand its embeddings.

    Raises:
        ExactnessError: a batch with VBE lacks inverse indices, or some are out of range.
    """
    batch, ids, num_ids = _coalesce(features, groups)
    counts = num_ids[: len(groups.coalesced)]
    lengths = torch.ones(len(ids), dtype=features.lengths().dtype, device=ids.device)
    if not _takes_no_rows(ids.device):
        counts, lengths = _with_empty_rows(counts, lengths, groups)
    strides = counts + [len(batch.lengths[name]) for name in groups.others]
    weights = None
    # If one table is weighted, the bags of all tables are pooled here: unique rows need no weights.
    if groups.others and features.weights_or_none() is not None:
        given = features.weights()
        weights = _with_others(given.new_ones(len(ids)), _by_key(given, features), groups)
    unique = KeyedJaggedTensor(
        keys=groups.keys,
        values=_with_others(ids, batch.ids, groups),
        weights=weights,
        lengths=_with_others(lengths, batch.lengths, groups),
        length_per_key=num_ids,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(
            groups.keys,
            torch.empty(len(strides), 0, dtype=torch.int64, device=ids.device),
        ),
    )
    return unique, batch


def only_expanded(features: KeyedJaggedTensor, groups: FeatureGroups) -> Coalesced:
    """Return only the indices that expand unique rows to all rows, without coalesced tables."""
    return Coalesced({}, {}, {}, {}, *_inverse_indices(features, groups))


def _takes_no_rows(device: torch.device) -> bool:
    return device.type == "cpu"


def _with_empty_rows(
    counts: list[int], lengths: Tensor, groups: FeatureGroups
) -> tuple[list[int], Tensor]:
    """Add an empty row to features without rows if their group has fewer rows than features.

    Return the new number of rows of each feature, and the new lengths of all rows.
    """
    found = dict(zip(groups.coalesced, counts, strict=True))
    for group in groups.groups:
        if found[group[0]] < len(group):
            found.update((name, 1) for name in group if not found[name])
    rows = list(found.values())
    if rows == counts:
        return counts, lengths
    parts = [
        lengths.new_ones(count) if count else lengths.new_zeros(number)
        for count, number in zip(counts, rows, strict=True)
    ]
    return rows, torch.cat(parts)


def _coalesce(
    features: KeyedJaggedTensor, groups: FeatureGroups
) -> tuple[Coalesced, Tensor, list[int]]:
    """Return data to expand embeddings, the distinct ids, and the number of ids of each feature."""
    names, ids = groups.coalesced, _by_key(features.values(), features)
    sizes = [len(ids[name]) for name in names]
    same_order = names == features.keys()
    unique = unique_ids(
        features.values() if same_order else torch.cat([ids[name] for name in names]),
        [sum(len(ids[name]) for name in group) for group in groups.groups],
    )
    carriers = [group[0] for group in groups.groups]
    counts = dict.fromkeys(names, 0) | dict(zip(carriers, unique.counts, strict=True))
    first = dict(zip(carriers, unique.first, strict=True))
    weights = features.weights_or_none()
    # FBGEMM's convention: integer weights are ignored, and other types become float32.
    weighted = weights is not None and weights.is_floating_point()
    inverse_indices, num_rows = _inverse_indices(features, groups)
    lengths = torch.split(features.lengths(), features.stride_per_key())
    batch = Coalesced(
        inverse=dict(zip(names, torch.split(unique.inverse, sizes), strict=True)),
        lengths=dict(zip(features.keys(), lengths, strict=True)),
        ids=ids,
        weights=_by_key(features.weights().float(), features) if weighted else {},
        inverse_indices=inverse_indices,
        num_rows=num_rows,
        first={name: first[carrier] for name, carrier in groups.carriers.items()},
    )
    return batch, unique.ids, [*counts.values(), *(len(ids[name]) for name in groups.others)]


def _inverse_indices(
    features: KeyedJaggedTensor, groups: FeatureGroups
) -> tuple[dict[str, Tensor], int]:
    """Return a dict from feature to its inverse indices, checked for range, and their length."""
    inverse = features.inverse_indices_or_none()
    if inverse is None and not features.variable_stride_per_key():
        return {}, features.stride()
    names, indices = inverse or ([], torch.empty(0, 0))
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    if missing := sorted(set(groups.keys) - set(names)):
        raise ExactnessError(
            "the batch has variable strides (VBE) but no inverse_indices for the features "
            f"{', '.join(map(repr, missing))}. Pass inverse_indices for all features that look up "
            "tables."
        )
    if indices.device.type == "cpu" and indices.numel():  # CUDA checks by itself
        lowest, highest = (each.tolist() for each in indices.aminmax(dim=1))
        for name, low, high in zip(names, lowest, highest, strict=True):
            if low < 0 or high >= strides[name]:
                raise ExactnessError(
                    f"feature {name!r}: inverse_indices range from {low} to {high}, but the batch "
                    f"has {strides[name]} rows of the feature. Pass indices from 0 to "
                    f"{strides[name] - 1}."
                )
    return dict(zip(names, indices, strict=True)), indices.shape[1]


def _by_key(tensor: Tensor, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Split ``tensor``, which has one item per id, into a dict from feature to its items."""
    parts = torch.split(tensor, features.length_per_key())
    return dict(zip(features.keys(), parts, strict=True))


def _with_others(own: Tensor, parts: Mapping[str, Tensor], groups: FeatureGroups) -> Tensor:
    """Append the parts of features of tables without coalescing to ``own``."""
    return torch.cat([own, *(parts[name] for name in groups.others)]) if groups.others else own
