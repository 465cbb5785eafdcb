"""Preprocessing on a partial IKJT: on shared ids, on lengths, or on the unique rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recd_plugins.data.apply_step import apply_to_ids, step_call
from recd_plugins.data.preprocess_unique import transform_together
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Preprocessing
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor

Steps = Sequence[Preprocessing]


def transform_partial(
    partial: PartialInverseKeyedJaggedTensor, runs: Iterable[tuple[Sequence[str], Steps]]
) -> tuple[PartialInverseKeyedJaggedTensor | None, list[InverseKeyedJaggedTensor]]:
    """The features whose steps let rows share ids, and the others in exact form.

    Args:
        partial: left as it is.
        runs: its neighbouring features with the same steps, in its order.

    Raises:
        PluginError: a step failed, or returned something other than its interface allows.
    """
    parts: list[PartialInverseKeyedJaggedTensor] = []
    exact: list[InverseKeyedJaggedTensor] = []
    first = 0
    for features, steps in runs:
        part = _features(partial, first, first + len(features))
        first += len(features)
        for at, step in enumerate(steps):
            changed = _apply(step, part)
            if changed is None:
                exact += transform_together(steps[at:], part.to_ikjt())
                break
            part = changed
        else:
            parts.append(part)
    return _concat(parts), exact


def _apply(
    step: Preprocessing, part: PartialInverseKeyedJaggedTensor
) -> PartialInverseKeyedJaggedTensor | None:
    """The same in partial form after ``step``, or None where that looks beyond one id."""
    if step.scope == "id":
        values = apply_to_ids(step, part.keys(), part.values())
        return PartialInverseKeyedJaggedTensor(
            part.keys(), values, part.offsets(), part.lengths(), part.length_per_key()
        )
    with step_call(step, f"kept_lengths of {', '.join(part.keys())}"):
        kept = step.kept_lengths(part.lengths())
    if kept is None:
        return None
    if kept.shape != part.lengths().shape or bool(((kept < 0) | (kept > part.lengths())).any()):
        raise PluginError(
            f"{step.title}: kept_lengths of {', '.join(part.keys())} returned other than one "
            "length for each row, at least 0 and no longer than the row"
        )
    return _shortened(part, kept.to(part.lengths().dtype))


def _shortened(
    part: PartialInverseKeyedJaggedTensor, lengths: Tensor
) -> PartialInverseKeyedJaggedTensor:
    """Rows cut at their end; ids that no row has any longer are dropped."""
    values, offsets, length_per_key = [], [], []
    new_lengths = lengths.view(len(part.keys()), -1)
    for (_, ids, starts, _), kept in zip(part.split(), new_lengths, strict=True):
        used = _used(ids.numel(), starts.long(), kept)
        places = torch.cumsum(used, 0) - used  # of an id among those that are used
        values.append(ids[used[:-1].bool()])
        offsets.append(places.index_select(0, starts).to(starts.dtype))
        length_per_key.append(values[-1].numel())
    return PartialInverseKeyedJaggedTensor(
        part.keys(), torch.cat(values), torch.cat(offsets), lengths, length_per_key
    )


def _used(num_ids: int, starts: Tensor, lengths: Tensor) -> Tensor:
    """1 for each id that a row has, else 0, int64 ``[num_ids + 1]``: rows may start at the end."""
    change = torch.zeros(num_ids + 1, dtype=torch.int64, device=starts.device)
    change.index_add_(0, starts, torch.ones_like(starts))
    change.index_add_(0, starts + lengths, torch.full_like(starts, -1))
    return (torch.cumsum(change, 0) > 0).long()


def _features(
    partial: PartialInverseKeyedJaggedTensor, first: int, last: int
) -> PartialInverseKeyedJaggedTensor:
    """Neighbouring features; nothing is copied."""
    sizes, stride = partial.length_per_key(), partial.stride()
    start = sum(sizes[:first])
    return PartialInverseKeyedJaggedTensor(
        partial.keys()[first:last],
        partial.values()[start : start + sum(sizes[first:last])],
        partial.offsets()[first * stride : last * stride],
        partial.lengths()[first * stride : last * stride],
        sizes[first:last],
    )


def _concat(
    parts: Sequence[PartialInverseKeyedJaggedTensor],
) -> PartialInverseKeyedJaggedTensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return PartialInverseKeyedJaggedTensor(
        [key for part in parts for key in part.keys()],  # noqa: SIM118
        torch.cat([part.values() for part in parts]),
        torch.cat([part.offsets() for part in parts]),
        torch.cat([part.lengths() for part in parts]),
        [size for part in parts for size in part.length_per_key()],
    )
