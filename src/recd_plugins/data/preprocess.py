"""Preprocessing of batches: each step processes the stored rows of a feature."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, groupby, pairwise, product

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import Entry, RunConfig
from recd_plugins.config.entries import matched
from recd_plugins.data.arrow import dense_features, place, sparse_column
from recd_plugins.data.checks import all_finite, check_numbers
from recd_plugins.data.rows import training_rows
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Rows, Table
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.report.progress import row_progress
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import DataError, PluginError, Problem, RecdError, RegistryError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.from_columns import kjt_from_columns
from recd_plugins.sparse.jagged import adjacent_runs, offsets_of

_CALLED = {"ids": "sparse features", "numbers": "dense features"}
# Limit for feature rows kept in memory during one pass over the table, in bytes.
_KEPT_BYTES = 1 << 28

_Chain = tuple[Preprocessing, ...]
#: Values and lengths of rows.
_Jagged = tuple[Tensor, Tensor]
_Partial = PartialInverseKeyedJaggedTensor
Steps = dict[str, _Chain]
#: Tensors, keyed by a JSON list of entry number, feature ("" if shared by all) and tensor name.
FittedState = Mapping[str, Tensor]


@contextmanager
def _step_call(step: Preprocessing, what: str) -> Iterator[None]:
    """Add the entry's name to errors that a step raises."""
    try:
        with plugin_call(step, what):
            yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        if step.stands_at is None:
            raise
        raise DataError(f"{step.title}: {error}") from error


def _apply_steps(
    steps: Sequence[Preprocessing], features: Sequence[str], values: Tensor, lengths: Tensor
) -> _Jagged:
    for step in steps:
        if step.scope == "id":
            values = _apply_to_ids(step, features, values)
        else:
            values, offsets = _apply(step, features, values, offsets_of(lengths))
            lengths = torch.diff(offsets).to(lengths.dtype)
    return values, lengths


def _apply_to_ids(step: Preprocessing, features: Sequence[str], values: Tensor) -> Tensor:
    """Apply a step of scope ``id`` to all values, passed as one row."""
    return _apply(step, features, values, torch.tensor([0, values.numel()]))[0]


def _apply(
    step: Preprocessing, features: Sequence[str], values: Tensor, offsets: Tensor
) -> _Jagged:
    with _step_call(step, f"transform of {', '.join(features)}"):
        return step.transform(values, offsets)


class Preprocess:
    """Applies the steps of each feature, in order, to the stored rows of a batch.

    Neighbouring features with the same steps are processed in one call.

    Args:
        steps: the steps, keyed by feature.
        dense: names of the dense features, in the order of a batch's columns.
    """

    def __init__(
        self, steps: Mapping[str, Sequence[Preprocessing]], dense: Sequence[str] = ()
    ) -> None:
        self._steps = {feature: tuple(chain) for feature, chain in steps.items() if chain}
        self._dense = tuple(dense)
        #: Title of the last step, keyed by feature.
        self.made_by = {feature: chain[-1].title for feature, chain in self._steps.items()}

    def __call__(self, batch: Batch, rows: Rows | None = None) -> Batch:
        """Return a batch with transformed features."""
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
        """Transform IKJTs with the same steps in one call, if they are adjacent in memory."""
        for steps, run in groupby(ikjts, self._common_steps):
            group = list(run)
            for ikjt in group:
                self._refuse_weights(ikjt)
            if steps:
                yield from _transform_together(steps, group)
            else:
                yield from map(self._transform_ikjt, group)

    def _common_steps(self, ikjt: InverseKeyedJaggedTensor) -> _Chain | None:
        """Return the steps of all features of an IKJT, or None if they differ."""
        chains = {self._steps.get(key, ()) for key in ikjt.keys()}  # noqa: SIM118
        return chains.pop() if len(chains) == 1 else None

    def _transform_ikjt(self, ikjt: InverseKeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        if self._steps.keys().isdisjoint(ikjt.keys()):
            return ikjt
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
        """Return the partial IKJTs, and exact IKJTs for features with a step of scope ``row``."""
        shared: list[_Partial] = []
        exact: list[InverseKeyedJaggedTensor] = []
        for partial in partials:
            first = 0
            for features, steps in self._runs(partial.keys()):
                part = _features(partial, first, first + len(features))
                first += len(features)
                for at, step in enumerate(steps):
                    changed = _apply_to_partial(step, part)
                    if changed is None:
                        exact += _transform_together(steps[at:], part.to_ikjt())
                        break
                    part = changed
                else:
                    shared.append(part)
        return tuple(shared), tuple(exact)

    def _transform_rows(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> _Jagged:
        """Return new values and lengths for the stored rows."""
        keys, values, lengths = rows.keys(), rows.values(), rows.lengths()
        runs = list(self._runs(keys))
        if len(runs) == 1:
            return _apply_steps(runs[0][1], keys, values, lengths)
        by_feature = lengths.view(len(keys), -1)
        ids_per_feature = by_feature.sum(1).tolist()
        parts: list[_Jagged] = []
        feature, value = 0, 0
        for features, steps in runs:
            last = feature + len(features)
            end = value + sum(ids_per_feature[feature:last])
            parts.append(
                _apply_steps(steps, features, values[value:end], by_feature[feature:last].flatten())
            )
            feature, value = last, end
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[list[str], _Chain]]:
        """Yield groups of neighbouring features that have the same steps."""
        for steps, run in groupby(names, lambda name: self._steps.get(name, ())):
            yield list(run), steps

    def _refuse_weights(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> None:
        changed = [key for key in rows.keys() if key in self._steps]  # noqa: SIM118
        if changed and rows.weights_or_none() is not None:
            raise DataError(
                f"features with weights cannot be transformed: {', '.join(changed)}; take them out "
                "of preprocessing, or give them no weights"
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
    """Apply the same steps to IKJTs, in one call for those that are adjacent in memory."""
    # A call costs as much as thousands of ids, and a batch has dozens of IKJTs.
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
    ((_, all_lengths), *others) = adjacent_runs([ikjt.lengths() for ikjt in ikjts])
    if others:
        return [
            _with_rows(ikjt, *_apply_steps(steps, ikjt.keys(), ikjt.values(), ikjt.lengths()))
            for ikjt in ikjts
        ]
    values, lengths = _apply_steps(steps, keys, all_values, all_lengths)
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
    return InverseKeyedJaggedTensor(
        keys=ikjt.keys(), values=values, inverse_lookup=ikjt.inverse_lookup(), lengths=lengths
    )


def _apply_to_partial(step: Preprocessing, part: _Partial) -> _Partial | None:
    """Return the features after ``step``, or None if the step needs whole rows."""
    if step.scope == "id":
        values = _apply_to_ids(step, part.keys(), part.values())
        return _Partial(part.keys(), values, part.offsets(), part.lengths(), part.length_per_key())
    with _step_call(step, f"kept_lengths of {', '.join(part.keys())}"):
        kept = step.kept_lengths(part.lengths())
    return None if kept is None else _shortened(part, kept.to(part.lengths().dtype))


def _shortened(part: _Partial, lengths: Tensor) -> _Partial:
    """Truncate rows at their end, and drop ids that are no longer in any row."""
    values, offsets, length_per_key = [], [], []
    new_lengths = lengths.view(len(part.keys()), -1)
    for (_, ids, starts, _), kept in zip(part.split(), new_lengths, strict=True):
        # Rows that start at each id, minus those that end before it. Rows may start at the end.
        change = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
        first = starts.long()
        change.index_add_(0, first, torch.ones_like(first))
        change.index_add_(0, first + kept, torch.full_like(first, -1))
        used = (torch.cumsum(change, 0) > 0).long()
        places = torch.cumsum(used, 0) - used  # index of an id among the used ones
        values.append(ids[used[:-1].bool()])
        offsets.append(places.index_select(0, starts).to(starts.dtype))
        length_per_key.append(values[-1].numel())
    return _Partial(part.keys(), torch.cat(values), torch.cat(offsets), lengths, length_per_key)


def _features(partial: _Partial, first: int, last: int) -> _Partial:
    """Return neighbouring features without a copy."""
    sizes, stride = partial.length_per_key(), partial.stride()
    start = sum(sizes[:first])
    return _Partial(
        partial.keys()[first:last],
        partial.values()[start : start + sum(sizes[first:last])],
        partial.offsets()[first * stride : last * stride],
        partial.lengths()[first * stride : last * stride],
        sizes[first:last],
    )


def _transform_columns(
    steps: Sequence[Preprocessing], features: Sequence[str], columns: Tensor, rows: Rows | None
) -> Tensor:
    """Apply steps to dense features in the dtype of ``columns``, and round to float32."""
    num_rows, num_features = columns.shape
    values = columns.t().flatten()
    offsets = torch.arange(values.numel() + 1)
    for step in steps:
        values, offsets = _apply(step, features, values, offsets)
    by_feature = values.float().view(num_features, num_rows, -1)
    if not all_finite(by_feature):
        feature, row, _ = (~by_feature.isfinite()).nonzero()[0].tolist()
        name = features[feature]
        where = f"row {row}, column {name!r}" if rows is None else place(rows, name, row)
        raise DataError(
            f"{where}: {', then '.join(step.title for step in steps)} make "
            f"{by_feature[feature, row].tolist()} of {columns[row, feature].item()}; keep the "
            "number between bounds by a step before, or leave the row out"
        )
    return by_feature.transpose(0, 1).reshape(num_rows, -1)


def feature_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return the steps of each feature that has steps, in the order of the file.

    A pattern matches only features that the step supports: sparse features for id steps, dense
    features for number steps.

    Raises:
        RegistryError: a pattern matches no feature that its step supports; or a feature has
            two vocabularies.
    """
    of_kind = {"ids": schema.sparse, "numbers": schema.dense}
    names = dict.fromkeys((*schema.sparse, *schema.dense))
    claims = registry.claim("preprocessing", names)
    problems = []
    taken: dict[str, set[str]] = {}
    for entry in registry.preprocessing:
        takes = entry.plugin.takes
        taken[entry.field] = {name for kind in takes for name in of_kind[kind]}
        for pattern in entry.patterns:
            found = matched(pattern, names)
            if taken[entry.field].isdisjoint(found):
                kind = "sparse (ids)" if found[0] in schema.sparse else "dense (numbers)"
                message = (
                    f"{entry.plugin.name} takes {' and '.join(_CALLED[k] for k in takes)}, and "
                    f"{pattern} matches {', '.join(found)}: {kind}"
                )
                problems.append(_problem(registry, entry, message))
    chains = {
        name: [entry for entry in entries if name in taken[entry.field]]
        for name, entries in claims.items()
    }
    for name, chain in chains.items():
        first: dict[str, Entry[Preprocessing]] = {}
        for entry in chain:
            known = first.setdefault(entry.plugin.name, entry)
            if known is not entry and num_ids_of(entry.plugin) is not None:
                message = (
                    f"{name} already has {entry.plugin.name} in {known.field} (line {known.line}); "
                    "leave the feature out of one of them"
                )
                problems.append(_problem(registry, entry, message))
    if problems:
        raise RegistryError(problems)
    return {name: tuple(entry.plugin for entry in chain) for name, chain in chains.items() if chain}


def _problem(registry: RunConfig, entry: Entry[Preprocessing], message: str) -> Problem:
    return Problem(str(registry.path), entry.line, f"{entry.field}.features", message)


def num_ids_of(step: Preprocessing) -> int | None:
    """Return the number of ids that a step produces, whether it is fitted or not."""
    with plugin_call(step, "num_ids, which is asked before fit,"):
        return step.num_ids


def refuse_ids_apart(registry: RunConfig, tables: Sequence[Table]) -> None:
    """Refuse separate vocabularies in one table, since an id would have several rows."""
    numbering = [
        entry for entry in _fitted_entries(registry) if num_ids_of(entry.plugin) is not None
    ]
    problems = []
    for table, entry in product(tables, numbering):
        those = [name for name in table.features if entry.matches(name)]
        together = entry.plugin.fits_together and len(those) == len(table.features)
        if not those or len(table.features) == 1 or together:
            continue
        message = (
            f"{' and '.join(table.features)} share the table {table.name}, and {entry.plugin.name} "
            f"numbers the ids of {' and of '.join(those)} apart; name all of them in one entry "
            "with shared: true"
        )
        problems.append(Problem(str(registry.path), entry.line, entry.field, message))
    if problems:
        raise RegistryError(problems)


def num_dense_inputs(registry: RunConfig, schema: FeatureSchema) -> int:
    """Return the number of columns of ``Batch.dense_features`` after preprocessing."""
    steps = feature_steps(registry, schema)
    return sum(math.prod(step.width for step in steps.get(name, ())) for name in schema.dense)


def build_preprocess(registry: RunConfig, schema: FeatureSchema) -> Preprocess:
    """Return the preprocessing of a registry, with ``fitted_steps``."""
    return Preprocess(fitted_steps(registry, schema), schema.dense)


def fitted_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return the steps of ``feature_steps`` after fitting.

    Each entry is fitted once per process, on the training rows that earlier entries have already
    processed.

    Raises:
        DataError: the data is missing or wrong, or a step refuses it.
        RegistryError: see ``feature_steps``.
    """
    steps = feature_steps(registry, schema)
    for entry in _fitted_entries(registry):
        plugin = entry.plugin
        claimed = {name: chain for name, chain in steps.items() if plugin in chain}
        if plugin.fitted is None:
            # Works on a copy, so that a failed fit can be repeated.
            shared, fitted = _unfitted(plugin), {}
            for name, rows in _training_rows(registry, schema, list(claimed), plugin.fit_rows):
                step = shared if plugin.fits_together else _unfitted(plugin)
                before = claimed[name][: claimed[name].index(plugin)]
                _fit(step, name, (_apply_steps(before, [name], *part) for part in rows))
                fitted[name] = step
            plugin.fitted = fitted
        for name, step in (plugin.fitted or {}).items():
            steps[name] = tuple(step if each is plugin else each for each in steps[name])
    return steps


def _fit(step: Preprocessing, feature: str, rows: Iterable[_Jagged]) -> None:
    parts = ((values, offsets_of(lengths)) for values, lengths in rows)
    what = f"fitting {step.name} to {feature}"
    with doing(what, long=True), _step_call(step, f"fit to {feature}"):
        step.fit(feature, parts)


def _fitted_entries(registry: RunConfig) -> list[Entry[Preprocessing]]:
    return [
        entry for entry in registry.preprocessing if type(entry.plugin).fit is not Preprocessing.fit
    ]


def _unfitted(plugin: Preprocessing) -> Preprocessing:
    return type(plugin)(plugin.options).placed(plugin.stands_at)


def _training_rows(
    registry: RunConfig, schema: FeatureSchema, features: Sequence[str], limit: int | None
) -> Iterator[tuple[str, Iterable[_Jagged]]]:
    """Yield each feature with its first ``limit`` training rows, as stored.

    Reading one column takes about as long as reading all columns, so one pass over the table keeps
    as many features as fit into ``_KEPT_BYTES``. A larger feature is streamed.
    """
    left = list(features)
    while left:
        kept: dict[str, list[_Jagged]] = {name: [] for name in left}
        size = 0
        with _bar(f"reading rows to fit {left[0]}", limit) as advance:
            for rows in training_rows(registry, limit):
                for name, parts in kept.items():
                    parts.append(_jagged(rows, name, schema))
                    size += _num_bytes(parts[-1:])
                while kept and size > _KEPT_BYTES:
                    size -= _num_bytes(kept.popitem()[1])
                if not kept:
                    break
                advance(len(rows))
        yield from kept.items()
        if not kept:
            first = left[0]
            yield first, (_jagged(rows, first, schema) for rows in training_rows(registry, limit))
        left = left[max(1, len(kept)) :]


def _num_bytes(parts: Sequence[_Jagged]) -> int:
    return sum(values.nbytes + lengths.nbytes for values, lengths in parts)


def _bar(what: str, rows: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Show a progress bar of rows on rank 0."""
    if dist.is_initialized() and dist.get_rank():
        return nullcontext(lambda _: None)
    return row_progress(what, rows)


def _jagged(rows: Rows, feature: str, schema: FeatureSchema) -> _Jagged:
    """Return values and lengths of a sparse feature, or of a dense one with one number per row."""
    if feature in schema.sparse:
        kjt = kjt_from_columns({feature: sparse_column(rows, feature)}, len(rows))
        return kjt.values(), kjt.lengths()
    numbers = dense_features(rows, (feature,))
    only = FeatureSchema((), (feature,), schema.label)
    check_numbers(Batch(numbers, torch.zeros(len(rows))), only, rows)
    return numbers.flatten(), torch.ones(len(rows), dtype=torch.int32)


def fitted_state(registry: RunConfig) -> dict[str, Tensor]:
    """Return the fitted state of each entry that has state, for a checkpoint."""
    found = {}
    for number, entry in _entries_with_state(registry):
        for feature, step in (entry.plugin.fitted or {}).items():
            of = "" if step.fits_together else feature
            with _step_call(step, f"fitted_state of {feature}"):
                for name, tensor in step.fitted_state().items():
                    found[json.dumps([number, of, name])] = tensor.detach().cpu()
    return found


def load_fitted_state(registry: RunConfig, state: FittedState, entries: Collection[int]) -> None:
    """Load the fitted state of entries instead of fitting. Entries without state stay unfitted."""
    to_load = [
        (number, entry.plugin)
        for number, entry in _entries_with_state(registry)
        if number in entries and entry.plugin.fitted is None
    ]
    if not to_load or not state:
        return
    by_step: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        number, feature, name = json.loads(key)
        by_step.setdefault((number, feature), {})[name] = tensor
    steps = feature_steps(registry, registry.dataset.schema())
    for number, plugin in to_load:
        claimed = [feature for feature, chain in steps.items() if plugin in chain]
        of = {feature: "" if plugin.fits_together else feature for feature in claimed}
        if {(number, name) for name in of.values()} != {key for key in by_step if key[0] == number}:
            continue
        plugin.fitted = {
            feature: _loaded(plugin, feature, by_step[number, name]) for feature, name in of.items()
        }


def _loaded(plugin: Preprocessing, feature: str, state: Mapping[str, Tensor]) -> Preprocessing:
    step = plugin if plugin.fits_together else _unfitted(plugin)
    with _step_call(step, f"load_fitted_state of {feature}"):
        step.load_fitted_state(state)
    return step


def _entries_with_state(registry: RunConfig) -> Iterator[tuple[int, Entry[Preprocessing]]]:
    for number, entry in enumerate(registry.preprocessing):
        if type(entry.plugin).fitted_state is not Preprocessing.fitted_state:
            yield number, entry
