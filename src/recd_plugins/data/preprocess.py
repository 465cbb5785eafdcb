"""Preprocessing of a batch: each feature in the form it has, over the rows that are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.arrow import place
from recd_plugins.data.checks import all_finite
from recd_plugins.errors import DataError, PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces import Preprocessing, Rows
from recd_plugins.plugin_call import plugin_call
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import adjacent, adjacent_runs, offsets_of
from recd_plugins.values.batch import Batch

# Numbers that a message shows of one row.
_MOST_SHOWN = 4

Steps = tuple[Preprocessing, ...]
_Rows = tuple[Tensor, Tensor]
_Partial = PartialInverseKeyedJaggedTensor


@contextmanager
def step_call(
    step: Preprocessing, what: str, of_others: Collection[RecdError] = ()
) -> Iterator[None]:
    """A context in which code of a step runs: what it raises names its entry."""
    try:
        with plugin_call(step, what):
            yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        if step.stands_at is None or error in of_others:
            raise
        problem = Problem(*step.stands_at, f"{step.name}: {error}")
        if isinstance(error, DataError):
            raise DataError(str(problem)) from error
        raise RegistryError([problem]) from error


def apply_steps(
    steps: Sequence[Preprocessing], features: Sequence[str], values: Tensor, lengths: Tensor
) -> _Rows:
    """Return new values and lengths of the rows of ``features``, one feature after the other."""
    for step in steps:
        if step.scope == "id":
            values = _apply_to_ids(step, features, values)
        else:
            values, offsets = _apply(step, features, values, offsets_of(lengths))
            lengths = torch.diff(offsets).to(lengths.dtype)
    return values, lengths


def _apply_to_ids(step: Preprocessing, features: Sequence[str], values: Tensor) -> Tensor:
    """A step whose scope is one id: rows do not matter, so all values go as one row."""
    return _apply(step, features, values, torch.tensor([0, values.numel()]))[0]


def _apply(step: Preprocessing, features: Sequence[str], values: Tensor, offsets: Tensor) -> _Rows:
    with step_call(step, f"transform of {', '.join(features)}"):
        return step.transform(values, offsets)


class Preprocess:
    """Runs the steps of each feature, in order, over the rows that are stored.

    Neighbouring features with the same steps are transformed in one call, as more rows.

    Args:
        steps: by feature; features that a batch lacks do not matter.
        dense: names of the columns of a batch's dense features, in order.
    """

    def __init__(
        self, steps: Mapping[str, Sequence[Preprocessing]], dense: Sequence[str] = ()
    ) -> None:
        self._steps = {feature: tuple(chain) for feature, chain in steps.items() if chain}
        self._dense = tuple(dense)
        #: The last step of each feature that has some, by its title in messages.
        self.made_by = {feature: chain[-1].title for feature, chain in self._steps.items()}

    def __call__(self, batch: Batch, rows: Rows | None = None) -> Batch:
        """Return the batch with transformed features; ``batch`` itself is left as it is."""
        partials, exact = self._transform_partials(batch.partials)
        return replace(
            batch,
            dense_features=self._transform_dense(batch.dense_features, rows),
            kjt=None if batch.kjt is None else self._transform_kjt(batch.kjt),
            ikjts=(*self._transform_ikjts(batch.ikjts), *exact),
            partials=partials,
        )

    def _transform_ikjts(
        self, ikjts: Sequence[InverseKeyedJaggedTensor]
    ) -> Iterator[InverseKeyedJaggedTensor]:
        """Those with the same steps in one call, if they lie one after the other in memory."""
        for steps, run in groupby(ikjts, self._common_steps):
            group = list(run)
            if steps:
                for ikjt in group:
                    self._refuse_weights(ikjt)
                yield from _transform_together(steps, group)
            else:
                yield from map(self._transform_ikjt, group)

    def _common_steps(self, ikjt: InverseKeyedJaggedTensor) -> Steps | None:
        """The steps of its features, or None if they differ."""
        chains = {self._steps.get(key, ()) for key in ikjt.keys()}  # noqa: SIM118
        return chains.pop() if len(chains) == 1 else None

    def _transform_ikjt(self, ikjt: InverseKeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        if self._steps.keys().isdisjoint(ikjt.keys()):
            return ikjt
        self._refuse_weights(ikjt)
        return _with_rows(ikjt, *self._transform_rows(ikjt))

    def _transform_kjt(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self._steps.keys().isdisjoint(kjt.keys()):
            return kjt
        self._refuse_weights(kjt)
        values, lengths = self._transform_rows(kjt)
        return KeyedJaggedTensor(
            keys=kjt.keys(), values=values, lengths=lengths, stride=kjt.stride()
        )

    def _transform_partials(
        self, partials: Sequence[_Partial]
    ) -> tuple[tuple[_Partial, ...], tuple[InverseKeyedJaggedTensor, ...]]:
        """Partials, and the features that are exact now because a step looked beyond one id."""
        shared: list[_Partial] = []
        exact: list[InverseKeyedJaggedTensor] = []
        for partial in partials:
            if self._steps.keys().isdisjoint(partial.keys()):
                shared.append(partial)
                continue
            parts, first = [], 0
            for features, steps in self._runs(partial.keys()):
                part: _Partial | None = _features(partial, first, first + len(features))
                first += len(features)
                for at, step in enumerate(steps):
                    assert part is not None
                    changed = _apply_to_partial(step, part)
                    if changed is None:
                        exact += _transform_together(steps[at:], part.to_ikjt())
                    part = changed
                    if part is None:
                        break
                parts += [] if part is None else [part]
            shared += _concat(parts)
        return tuple(shared), tuple(exact)

    def _transform_rows(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> _Rows:
        """Values and lengths of the rows that are stored, feature by feature."""
        keys, values, lengths = rows.keys(), rows.values(), rows.lengths()
        runs = list(self._runs(keys))
        if len(runs) == 1:
            return apply_steps(runs[0][1], keys, values, lengths)
        by_feature = lengths.view(len(keys), -1)
        ids_per_feature = by_feature.sum(1).tolist()
        parts: list[_Rows] = []
        feature, value = 0, 0
        for features, steps in runs:
            last = feature + len(features)
            end = value + sum(ids_per_feature[feature:last])
            parts.append(
                apply_steps(steps, features, values[value:end], by_feature[feature:last].flatten())
            )
            feature, value = last, end
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[list[str], Steps]]:
        """Neighbouring features with the same steps."""
        for steps, run in groupby(names, lambda name: self._steps.get(name, ())):
            yield list(run), steps

    def _refuse_weights(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> None:
        if rows.weights_or_none() is None:
            return
        changed = [key for key in rows.keys() if key in self._steps]  # noqa: SIM118
        raise DataError(
            f"features with weights cannot be transformed: {', '.join(changed)}; take them out "
            "of preprocessing, or give them no weights (no step tells the weights of its ids)"
        )

    def _transform_dense(self, dense: Tensor, rows: Rows | None) -> Tensor:
        if self._steps.keys().isdisjoint(self._dense):
            return dense.float()
        parts, first = [], 0
        for features, steps in self._runs(self._dense):
            part = dense[:, first : first + len(features)]
            parts.append(_transform_columns(steps, features, part, rows) if steps else part.float())
            first += len(features)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _transform_together(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor]
) -> list[InverseKeyedJaggedTensor]:
    """All features of ``ikjts`` by the same steps, in one call where memory allows it.

    A call costs as much as thousands of ids, and a batch has dozens of IKJTs. Those of one
    converter lie one after the other, as rows of one large jagged tensor would.
    """
    transformed: list[InverseKeyedJaggedTensor] = []
    for count, values in adjacent_runs([ikjt.values() for ikjt in ikjts]):
        transformed += _transform_run(steps, ikjts[len(transformed) :][:count], values)
    return transformed


def _transform_run(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor], all_values: Tensor
) -> list[InverseKeyedJaggedTensor]:
    keys = [key for ikjt in ikjts for key in ikjt.keys()]  # noqa: SIM118
    if all(step.scope == "id" for step in steps):
        values = all_values
        for step in steps:
            values = _apply_to_ids(step, keys, values)
        parts = torch.split(values, [ikjt.values().numel() for ikjt in ikjts])
        return [ikjt.with_values(part) for ikjt, part in zip(ikjts, parts, strict=True)]
    all_lengths = adjacent([ikjt.lengths() for ikjt in ikjts])
    if all_lengths is None:
        return [
            _with_rows(ikjt, *apply_steps(steps, ikjt.keys(), ikjt.values(), ikjt.lengths()))
            for ikjt in ikjts
        ]
    values, lengths = apply_steps(steps, keys, all_values, all_lengths)
    num_rows = [ikjt.lengths().numel() for ikjt in ikjts]
    ends = offsets_of(lengths)[list(accumulate(num_rows))].tolist()
    num_ids = [end - start for start, end in pairwise([0, *ends])]
    return [
        _with_rows(ikjt, *rows)
        for ikjt, *rows in zip(
            ikjts, torch.split(values, num_ids), torch.split(lengths, num_rows), strict=True
        )
    ]


def _with_rows(
    ikjt: InverseKeyedJaggedTensor, values: Tensor, lengths: Tensor
) -> InverseKeyedJaggedTensor:
    """The same IKJT with other unique rows."""
    return InverseKeyedJaggedTensor(
        keys=ikjt.keys(), values=values, inverse_lookup=ikjt.inverse_lookup(), lengths=lengths
    )


def _apply_to_partial(step: Preprocessing, part: _Partial) -> _Partial | None:
    """The same in partial form after ``step``, or None where that looks beyond one id."""
    if step.scope == "id":
        values = _apply_to_ids(step, part.keys(), part.values())
        return _Partial(part.keys(), values, part.offsets(), part.lengths(), part.length_per_key())
    with step_call(step, f"kept_lengths of {', '.join(part.keys())}"):
        kept = step.kept_lengths(part.lengths())
    return None if kept is None else _shortened(part, kept.to(part.lengths().dtype))


def _shortened(part: _Partial, lengths: Tensor) -> _Partial:
    """Rows cut at their end; ids that no row has any longer are dropped."""
    values, offsets, length_per_key = [], [], []
    new_lengths = lengths.view(len(part.keys()), -1)
    for (_, ids, starts, _), kept in zip(part.split(), new_lengths, strict=True):
        used = _used(ids.numel(), starts.long(), kept)
        places = torch.cumsum(used, 0) - used  # of an id among those that are used
        values.append(ids[used[:-1].bool()])
        offsets.append(places.index_select(0, starts).to(starts.dtype))
        length_per_key.append(values[-1].numel())
    return _Partial(part.keys(), torch.cat(values), torch.cat(offsets), lengths, length_per_key)


def _used(num_ids: int, starts: Tensor, lengths: Tensor) -> Tensor:
    """1 for each id that a row has, else 0, int64 ``[num_ids + 1]``: rows may start at the end."""
    change = torch.zeros(num_ids + 1, dtype=torch.int64, device=starts.device)
    change.index_add_(0, starts, torch.ones_like(starts))
    change.index_add_(0, starts + lengths, torch.full_like(starts, -1))
    return (torch.cumsum(change, 0) > 0).long()


def _features(partial: _Partial, first: int, last: int) -> _Partial:
    """Neighbouring features; nothing is copied."""
    sizes, stride = partial.length_per_key(), partial.stride()
    start = sum(sizes[:first])
    return _Partial(
        partial.keys()[first:last],
        partial.values()[start : start + sum(sizes[first:last])],
        partial.offsets()[first * stride : last * stride],
        partial.lengths()[first * stride : last * stride],
        sizes[first:last],
    )


def _concat(parts: Sequence[_Partial]) -> Sequence[_Partial]:
    if len(parts) < 2:
        return parts
    joined = _Partial(
        [key for part in parts for key in part.keys()],  # noqa: SIM118
        torch.cat([part.values() for part in parts]),
        torch.cat([part.offsets() for part in parts]),
        torch.cat([part.lengths() for part in parts]),
        [size for part in parts for size in part.length_per_key()],
    )
    return [joined]


def _transform_columns(
    steps: Sequence[Preprocessing], features: Sequence[str], columns: Tensor, rows: Rows | None
) -> Tensor:
    """Apply steps to dense features, each a jagged feature with one number in each row.

    Steps compute in the dtype of ``columns``; the result is rounded to float32.
    """
    num_rows, num_features = columns.shape
    values = columns.t().flatten()
    offsets = torch.arange(values.numel() + 1)
    stages = [values]
    for step in steps:
        values, offsets = _apply(step, features, values, offsets)
        stages.append(values)
    values = stages[-1] = values.float()
    if not all_finite(values):
        shape = (num_features, num_rows, -1)
        raise _not_finite(steps, features, [each.view(shape) for each in stages], rows)
    by_feature = values.view(num_features, num_rows, -1)
    return by_feature.transpose(0, 1).reshape(num_rows, -1)


def _not_finite(
    steps: Sequence[Preprocessing],
    features: Sequence[str],
    stages: Sequence[Tensor],
    rows: Rows | None,
) -> DataError:
    """The error for numbers ``[num_features, num_rows, width]`` before the first step and after."""
    feature, row, _ = (~stages[-1].isfinite()).nonzero()[0].tolist()
    passed = [stage[feature, row] for stage in stages]
    # A step may mend the result of one before it: the last run of steps is at fault.
    finite = [all_finite(numbers) for numbers in passed]
    first = len(finite) - 1 - finite[::-1].index(True) if True in finite else 0
    given, made = (
        ", ".join(f"{number:g}" for number in passed[at][:_MOST_SHOWN].tolist())
        for at in (first, first + 1)
    )
    name = features[feature]
    where = f"row {row}, column {name!r}" if rows is None else place(rows, name, row)
    return DataError(
        f"{where}: {steps[first].title} makes {made} of {given}; give it numbers that "
        "it takes (a step before it may keep them between bounds), or leave the row out"
    )
