"""Preprocessing of batches, applied to unique rows of deduplicated features."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise, product
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import Entry, RunConfig
from recd_plugins.config.run_config import Steps, feature_steps
from recd_plugins.data.arrow import dense_features, place, sparse_column
from recd_plugins.data.checks import all_finite, check_numbers
from recd_plugins.data.rows import training_rows
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Rows, Table
from recd_plugins.interfaces.batch import Batch
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.report.progress import row_progress
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import DataError, PluginError, Problem, RecdError, RegistryError
from recd_plugins.sparse.from_columns import kjt_from_columns
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import joined, offsets_of
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

# Limit for feature rows kept in memory during one pass over the table, in bytes.
_KEPT_BYTES = 1 << 28

_Chain = tuple[Preprocessing, ...]
#: Values and lengths of rows.
_Jagged = tuple[Tensor, Tensor]
_Partial = PartialInverseKeyedJaggedTensor
_Rows: TypeAlias = KeyedJaggedTensor | InverseKeyedJaggedTensor
#: Tensors, keyed by a JSON list of entry number, feature ("" if shared by all) and tensor name.
FittedState = Mapping[str, Tensor]


@contextmanager
def _step_call(step: Preprocessing, what: str) -> Iterator[None]:
    """Context manager that adds the registry.yaml entry of the step to errors."""
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
    """Apply steps to jagged rows. Steps of scope ``id`` get all values as a single row."""
    for step in steps:
        per_row = step.scope == "row"
        offsets = offsets_of(lengths) if per_row else torch.tensor([0, values.numel()])
        with _step_call(step, f"transform of {', '.join(map(repr, features))}"):
            values, offsets = step.transform(values, offsets)
        if per_row:
            lengths = torch.diff(offsets).to(lengths.dtype)
    return values, lengths


@dataclass
class _Block:
    """Rows of adjacent features of one jagged tensor with equal preprocessing steps."""

    keys: Sequence[str]
    steps: _Chain
    values: Tensor
    lengths: Tensor


class Preprocess:
    """Applies preprocessing steps to a batch, and only to unique rows of deduplicated features.

    Features with the same steps are processed in one call per step. ``dense`` are the names of the
    dense features, in the order of ``Batch.dense_features``.
    """

    def __init__(
        self, steps: Mapping[str, Sequence[Preprocessing]], dense: Sequence[str] = ()
    ) -> None:
        self._steps = {feature: tuple(chain) for feature, chain in steps.items() if chain}
        self._dense = tuple(dense)
        #: Title of the last step, keyed by feature.
        self.made_by = {feature: chain[-1].title for feature, chain in self._steps.items()}

    def __call__(self, batch: Batch, rows: Rows | None = None) -> Batch:
        """Return a batch with preprocessed features. ``rows`` is used in error messages only."""
        partials, exact = self._transform_partials(batch.partials)
        kjt = batch.kjt
        if kjt is not None and not self._steps.keys().isdisjoint(kjt.keys()):
            ((values, lengths),) = self._transform_rows([kjt])
            kjt = KeyedJaggedTensor(kjt.keys(), values, lengths=lengths, stride=kjt.stride())
        return replace(
            batch,
            dense_features=self._transform_dense(batch.dense_features, rows),
            user_dense_columns=self._columns_after(batch.user_dense_columns),
            kjt=kjt,
            ikjts=(*self._transform_ikjts(batch.ikjts), *exact),
            partials=partials,
        )

    def _transform_ikjts(
        self, ikjts: Sequence[InverseKeyedJaggedTensor]
    ) -> list[InverseKeyedJaggedTensor]:
        return [
            ikjt
            if self._steps.keys().isdisjoint(ikjt.keys())
            else InverseKeyedJaggedTensor(
                ikjt.keys(), values, ikjt.inverse_lookup(), lengths=lengths
            )
            for ikjt, (values, lengths) in zip(ikjts, self._transform_rows(ikjts), strict=True)
        ]

    def _transform_rows(self, tensors: Sequence[_Rows]) -> list[_Jagged]:
        """Return ``(values, lengths)`` after preprocessing, one pair per jagged tensor."""
        # A call costs as much as thousands of ids, and a batch has dozens of IKJTs.
        blocks = [list(self._blocks(tensor)) for tensor in tensors]
        same: dict[_Chain, list[_Block]] = {}
        for block in chain.from_iterable(blocks):
            same.setdefault(block.steps, []).append(block)
        for steps, group in same.items():
            if steps:
                _transform_blocks(steps, group)
        return [
            (joined([block.values for block in each]), joined([block.lengths for block in each]))
            for each in blocks
        ]

    def _blocks(self, tensor: _Rows) -> Iterator[_Block]:
        keys, values, lengths = tensor.keys(), tensor.values(), tensor.lengths()
        changed = [key for key in keys if key in self._steps]
        if changed and tensor.weights_or_none() is not None:
            raise DataError(
                f"features {', '.join(map(repr, changed))} have weights, but preprocessing does "
                "not support weights. Remove these features from preprocessing:, or drop their "
                "weights"
            )
        by_feature = lengths.view(len(keys), -1)
        ids_per_feature = by_feature.sum(1).tolist() if len(keys) > 1 else [values.numel()]
        feature, value = 0, 0
        for features, steps in self._runs(keys):
            last = feature + len(features)
            end = value + sum(ids_per_feature[feature:last])
            yield _Block(features, steps, values[value:end], by_feature[feature:last].flatten())
            feature, value = last, end

    def _transform_partials(
        self, partials: Sequence[_Partial]
    ) -> tuple[tuple[_Partial, ...], tuple[InverseKeyedJaggedTensor, ...]]:
        """Preprocess partial IKJTs; return features whose steps need whole rows as IKJTs."""
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
                        left = Preprocess(dict.fromkeys(part.keys(), steps[at:]))
                        exact += left._transform_ikjts(part.to_ikjt())
                        break
                    part = changed
                else:
                    shared.append(part)
        return tuple(shared), tuple(exact)

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[list[str], _Chain]]:
        """Group adjacent features with equal preprocessing steps; yield (features, steps)."""
        for steps, run in groupby(names, lambda name: self._steps.get(name, ())):
            yield list(run), steps

    def _transform_dense(self, dense: Tensor, rows: Rows | None) -> Tensor:
        if self._steps.keys().isdisjoint(self._dense):
            return dense.float()
        parts, first = [], 0
        for features, steps in self._runs(self._dense):
            part = dense[:, first : first + len(features)]
            parts.append(_transform_columns(steps, features, part, rows) if steps else part.float())
            first += len(features)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _columns_after(self, columns: Sequence[int]) -> tuple[int, ...]:
        """Return the columns of the transformed dense features of ``columns``."""
        widths = [math.prod(step.width for step in self._steps.get(n, ())) for n in self._dense]
        starts = [0, *accumulate(widths)]
        return tuple(chain.from_iterable(range(starts[n], starts[n + 1]) for n in columns))


def _transform_blocks(steps: _Chain, blocks: Sequence[_Block]) -> None:
    """Apply the steps to all blocks in one call per step, and update the blocks in place."""
    features = [key for block in blocks for key in block.keys]
    values, lengths = _apply_steps(
        steps,
        features,
        joined([block.values for block in blocks]),
        joined([block.lengths for block in blocks]),
    )
    num_rows = [block.lengths.numel() for block in blocks]
    ends = offsets_of(lengths)[list(accumulate(num_rows))].tolist()
    num_ids = [end - start for start, end in pairwise([0, *ends])]
    for block, ids, of_rows in zip(
        blocks, torch.split(values, num_ids), torch.split(lengths, num_rows), strict=True
    ):
        block.values, block.lengths = ids, of_rows


def _apply_to_partial(step: Preprocessing, part: _Partial) -> _Partial | None:
    """Apply a step to partially deduplicated rows. Return None if the step needs full rows."""
    if step.scope == "id":
        values, _ = _apply_steps([step], part.keys(), part.values(), part.lengths())
        return _Partial(part.keys(), values, part.offsets(), part.lengths(), part.length_per_key())
    with _step_call(step, f"kept_lengths of {', '.join(map(repr, part.keys()))}"):
        kept = step.kept_lengths(part.lengths())
    return None if kept is None else _shortened(part, kept.to(part.lengths().dtype))


def _shortened(part: _Partial, lengths: Tensor) -> _Partial:
    """Truncate rows to ``lengths``, and drop stored ids that no row contains any more."""
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
    """Return features ``first`` to ``last`` (exclusive) without a copy."""
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
    """Apply steps to dense features ``[B, F]``, and convert the result to float32."""
    num_rows, num_features = columns.shape
    values = columns.t().flatten()
    values, _ = _apply_steps(steps, features, values, torch.ones(values.numel(), dtype=torch.int64))
    by_feature = values.float().view(num_features, num_rows, -1)
    if not all_finite(by_feature):
        feature, row, _ = (~by_feature.isfinite()).nonzero()[0].tolist()
        name = features[feature]
        where = f"row {row}, column {name!r}" if rows is None else place(rows, name, row)
        raise DataError(
            f"{where}: {', then '.join(step.title for step in steps)} turned "
            f"{columns[row, feature].item()} into {by_feature[feature, row].tolist()}. Clip the "
            "number in an earlier step, or drop this row"
        )
    return by_feature.transpose(0, 1).reshape(num_rows, -1)


def refuse_ids_apart(registry: RunConfig, tables: Sequence[Table]) -> None:
    """Raise RegistryError if features that share a table have separate vocabularies."""
    numbering = [each for each in _fitted_entries(registry) if each.plugin.num_ids is not None]
    for table, entry in product(tables, numbering):
        those = [name for name in table.features if entry.matches(name)]
        together = entry.plugin.fits_together and len(those) == len(table.features)
        if not those or len(table.features) == 1 or together:
            continue
        message = (
            f"features {' and '.join(map(repr, table.features))} share table {table.name!r}, but "
            f"{entry.plugin.name!r} builds a separate vocabulary for "
            f"{' and for '.join(map(repr, those))}. List all features of the table in one entry "
            "with shared: true"
        )
        raise RegistryError([Problem(str(registry.path), entry.line, entry.field, message)])


def dense_columns(registry: RunConfig, schema: FeatureSchema) -> tuple[str, ...]:
    """Return the feature of each column of ``Batch.dense_features`` after preprocessing."""
    steps = feature_steps(registry, schema)
    widths = {name: math.prod(step.width for step in steps.get(name, ())) for name in schema.dense}
    return tuple(chain.from_iterable([name] * width for name, width in widths.items()))


def fitted_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return a dict from feature name to its fitted preprocessing steps.

    Each entry is fitted once per process, on the training rows that earlier entries have already
    processed.

    Raises:
        DataError: the data is missing or wrong, or a step rejects the data.
        RegistryError: a pattern matches no feature that its step supports.
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
                parts = (_apply_steps(before, [name], *part) for part in rows)
                with (
                    doing(f"fitting {step.name} to {name}", long=True),
                    _step_call(step, f"fit to {name}"),
                ):
                    step.fit(name, ((values, offsets_of(lengths)) for values, lengths in parts))
                fitted[name] = step
            plugin.fitted = fitted
        for name, step in (plugin.fitted or {}).items():
            steps[name] = tuple(step if each is plugin else each for each in steps[name])
    return steps


def _fitted_entries(registry: RunConfig) -> list[Entry[Preprocessing]]:
    return [
        entry for entry in registry.preprocessing if type(entry.plugin).fit is not Preprocessing.fit
    ]


def _unfitted(plugin: Preprocessing) -> Preprocessing:
    return type(plugin)(plugin.options).placed(plugin.stands_at)


def _training_rows(
    registry: RunConfig, schema: FeatureSchema, features: Sequence[str], limit: int | None
) -> Iterator[tuple[str, Iterable[_Jagged]]]:
    """Yield each feature name with the feature's first ``limit`` training rows."""
    # Reading one column takes about as long as reading all columns, so one pass keeps as many
    # features as fit into ``_KEPT_BYTES``. Larger features are streamed.
    left = list(features)
    while left:
        kept: dict[str, list[_Jagged]] = {name: [] for name in left}
        size = 0
        first_rank = not dist.is_initialized() or dist.get_rank() == 0
        with (
            row_progress(f"reading rows to fit {left[0]}", limit)
            if first_rank
            else nullcontext(lambda _: None)
        ) as advance:
            for rows in training_rows(registry, limit):
                for name, parts in kept.items():
                    parts.append(_jagged(rows, name, schema))
                    size += sum(tensor.nbytes for tensor in parts[-1])
                while kept and size > _KEPT_BYTES:
                    size -= sum(tensor.nbytes for part in kept.popitem()[1] for tensor in part)
                if not kept:
                    break
                advance(len(rows))
        yield from kept.items()
        if not kept:
            first = left[0]
            yield first, (_jagged(rows, first, schema) for rows in training_rows(registry, limit))
        left = left[max(1, len(kept)) :]


def _jagged(rows: Rows, feature: str, schema: FeatureSchema) -> _Jagged:
    """Return ``(values, lengths)`` of a feature. A dense feature has length 1 in every row."""
    if feature in schema.sparse:
        kjt = kjt_from_columns({feature: sparse_column(rows, feature)}, len(rows))
        return kjt.values(), kjt.lengths()
    numbers = dense_features(rows, (feature,))
    only = FeatureSchema((), (feature,), schema.label)
    check_numbers(Batch(numbers, torch.zeros(len(rows))), only, rows)
    return numbers.flatten(), torch.ones(len(rows), dtype=torch.int32)


def fitted_state(registry: RunConfig) -> dict[str, Tensor]:
    """Return the fitted state of preprocessing. Keys are JSON: [entry index, feature, name]."""
    found = {}
    for number, entry in _entries_with_state(registry):
        for feature, step in (entry.plugin.fitted or {}).items():
            of = "" if step.fits_together else feature
            with _step_call(step, f"fitted_state of {feature}"):
                for name, tensor in step.fitted_state().items():
                    found[json.dumps([number, of, name])] = tensor.detach().cpu()
    return found


def load_fitted_state(registry: RunConfig, state: FittedState, entries: Collection[int]) -> None:
    """Load the fitted state of the preprocessing entries with indices ``entries``."""
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
        fitted = {}
        for feature, name in of.items():
            fitted[feature] = step = plugin if plugin.fits_together else _unfitted(plugin)
            with _step_call(step, f"load_fitted_state of {feature}"):
                step.load_fitted_state(by_step[number, name])
        plugin.fitted = fitted


def _entries_with_state(registry: RunConfig) -> Iterator[tuple[int, Entry[Preprocessing]]]:
    for number, entry in enumerate(registry.preprocessing):
        if type(entry.plugin).fitted_state is not Preprocessing.fitted_state:
            yield number, entry
