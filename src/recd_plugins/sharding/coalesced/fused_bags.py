"""Expands embeddings of distinct ids on a GPU. Further features add no kernel launches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from recd_plugins.sharding.coalesced.input_dist import Coalesced, numbers_on


@dataclass(frozen=True)
class BagColumns:
    """Output columns of one feature and table, or of a column shard of the table.

    Attributes:
        source: index of the tensor of received embeddings.
        column: first of the ``dim`` output columns.
        carrier: index of the ``BagColumns`` that received the rows of the same table.
        mean: whether sums are divided by the number of ids.
    """

    feature: str
    source: int
    dim: int
    column: int
    carrier: int
    mean: bool


def expand_at_once(
    sources: Sequence[Tensor],
    of: Sequence[int],
    indices: Sequence[Tensor],
    starts: Sequence[int],
) -> list[Tensor]:
    """Return ``sources[of[n]].index_select(0, indices[n] - starts[n])`` for each n.

    All sources have one dtype, width and device.
    """
    first = [0, *accumulate(map(len, sources))]
    sizes = list(map(len, indices))
    shifts = [first[n] - start for n, start in zip(of, starts, strict=True)]
    index = _shifted(torch.cat(list(indices)), shifts, sizes)
    return list(torch.split(torch.cat(list(sources)).index_select(0, index), sizes))


def _shifted(index: Tensor, shifts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Add a number to each segment of ``index``."""
    if not any(shifts):
        return index
    shift, size = numbers_on(index.device, shifts, sizes)
    return index + shift.repeat_interleave(size, output_size=len(index))


def pool_at_once(
    sources: Sequence[Tensor],
    columns: Sequence[BagColumns],
    batch: Coalesced,
    num_rows: Sequence[int],
) -> Tensor:
    """Return pooled embeddings ``[B, columns]``, with one ``embedding_bag`` per width and pooling.

    ``sources`` are flat tensors of embedding rows, in the order of ``columns``. ``num_rows`` has
    the number of rows of each of ``columns``.
    """
    rows, first = _rows_by_width(sources, columns, num_rows)
    groups: dict[tuple[int, bool, bool], list[int]] = defaultdict(list)
    order = sorted(range(len(columns)), key=lambda number: columns[number].column)
    for number in order:
        each = columns[number]
        groups[each.dim, each.feature in batch.inverse, each.mean].append(number)
    outputs = [
        _pool_group(
            rows[dim],
            [columns[number].feature for number in group],
            [first[columns[number].carrier] for number in group],
            batch,
            mean,
        ).flatten(1)
        for (dim, _, mean), group in groups.items()
    ]
    if len(outputs) == 1:
        return outputs[0]
    found = [number for group in groups.values() for number in group]
    starts = dict(zip(found, accumulate([0, *(columns[n].dim for n in found)]), strict=False))
    places = [starts[n] + scalar for n in order for scalar in range(columns[n].dim)]
    return torch.cat(outputs, dim=1).index_select(1, numbers_on(sources[0].device, places)[0])


def _rows_by_width(
    sources: Sequence[Tensor], columns: Sequence[BagColumns], num_rows: Sequence[int]
) -> tuple[dict[int, Tensor], list[int]]:
    """Return a dict from width to rows ``[R, width]``, and the first row of each of ``columns``."""
    blocks: dict[int, list[Tensor]] = defaultdict(list)
    counts, first = Counter[int](), []
    for each, count in zip(columns, num_rows, strict=True):
        first.append(counts[each.dim])
        counts[each.dim] += count
    sized = list(zip(columns, num_rows, strict=True))
    for number, source in enumerate(sources):
        own = [(each.dim, count) for each, count in sized if each.source == number]
        runs = [(dim, sum(n for _, n in run)) for dim, run in groupby(own, lambda item: item[0])]
        parts = [source] if len(runs) == 1 else torch.split(source, [dim * n for dim, n in runs])
        for (dim, _), part in zip(runs, parts, strict=True):
            blocks[dim].append(part.view(-1, dim))
    return {dim: torch.cat(own) if own[1:] else own[0] for dim, own in blocks.items()}, first


def _pool_group(
    rows: Tensor, features: Sequence[str], first: Sequence[int], batch: Coalesced, mean: bool
) -> Tensor:
    """Return ``[B, len(features), D]`` for features with equal width and pooling.

    ``first`` has the index in ``rows``, ``[R, D]``, of each feature's first row.
    """
    sent = [batch.inverse[feature] for feature in features if feature in batch.inverse]
    if sent or mean:
        lengths = [batch.lengths[feature] for feature in features]
        bags = [0, *accumulate(map(len, lengths))]
        sizes = list(map(len, sent or lengths))
        shifts = [row - batch.first.get(f, 0) for row, f in zip(first, features, strict=True)]
        # Rows that the kernel has pooled are bags of one row, divided by the number of their ids.
        weights = None
        if sent:
            index = torch.cat(sent)
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.cat(lengths).long())
            if batch.weights and not mean:
                weights = torch.cat([batch.weights[feature] for feature in features])
        else:
            offsets = torch.arange(bags[-1] + 1, device=rows.device)
            index = offsets[:-1]
            shifts = [row - bag for row, bag in zip(first, bags, strict=False)]
            weights = torch.cat(lengths).clamp(min=1).to(rows.dtype).reciprocal()
        if len(rows):
            rows = F.embedding_bag(
                _shifted(index, shifts, sizes),
                rows,
                offsets,
                mode="mean" if sent and mean else "sum",
                per_sample_weights=None if weights is None else weights.to(rows.dtype),
                include_last_offset=True,
            )
        else:  # embedding_bag refuses this case
            rows = rows.sum() + rows.new_zeros(bags[-1], rows.shape[1])
        first = bags[:-1]
        if not batch.inverse_indices:
            return rows.view(len(features), batch.num_rows, rows.shape[1]).transpose(0, 1)
    if batch.inverse_indices:
        inverse = torch.stack([batch.inverse_indices[feature] for feature in features], dim=1)
    else:
        inverse = torch.arange(batch.num_rows, device=rows.device).unsqueeze(1)
    places = inverse + numbers_on(rows.device, first)
    return rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[1])
