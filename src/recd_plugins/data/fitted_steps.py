"""The steps of preprocessing of each feature, fitted to the training rows once in a process."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugins.activity import doing
from recd_plugins.data.arrow import dense_features, sparse_column
from recd_plugins.data.checks import check_numbers
from recd_plugins.data.preprocess import Preprocess, apply_steps, step_call
from recd_plugins.data.rows import training_rows
from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Rows, Table
from recd_plugins.plugin_call import plugin_call
from recd_plugins.progress import row_progress
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.registry.entries import matched
from recd_plugins.sparse.from_columns import kjt_from_columns
from recd_plugins.sparse.jagged import offsets_of
from recd_plugins.values.batch import Batch

_CALLED = {"ids": "sparse features", "numbers": "dense features"}
# Bytes of feature rows that one pass over the table keeps in memory.
_KEPT_BYTES = 1 << 28

Steps = dict[str, tuple[Preprocessing, ...]]
#: Tensors by number of the entry, feature ("" where all share one) and name, in a name as JSON.
FittedState = Mapping[str, Tensor]
_Jagged = tuple[Tensor, Tensor]
_Key = tuple[int | None, str]


def feature_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return the steps of each feature that has some, in the order of the file.

    A pattern chooses among the features that the step takes: ``*`` stands for all sparse features
    where a step takes ids.
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
                problems.append(
                    Problem(
                        str(registry.path),
                        entry.line,
                        f"{entry.field}.features",
                        f"{entry.plugin.name} takes {' and '.join(_CALLED[k] for k in takes)}, and "
                        f"{pattern} matches {', '.join(found)}: {kind}",
                    )
                )
    chains = {
        name: [entry for entry in entries if name in taken[entry.field]]
        for name, entries in claims.items()
    }
    problems += _numbered_twice(registry, chains)
    if problems:
        raise RegistryError(problems)
    return {name: tuple(entry.plugin for entry in chain) for name, chain in chains.items() if chain}


def num_ids_of(step: Preprocessing) -> int | None:
    """Return how many ids a step makes, which is asked before it is fitted."""
    with plugin_call(step, "num_ids, which is asked before fit,"):
        return step.num_ids


def refuse_ids_apart(registry: RunConfig, tables: Sequence[Table]) -> None:
    """Refuse to number the features of one table by more than one numbering.

    An id would have another row by each of the features.
    """
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
            f"{' and '.join(table.features)} look up the rows of one table, {table.name}, and "
            f"{entry.plugin.name} numbers the ids of {' and of '.join(those)} by themselves: the "
            "same id would be another row. Name all of them in one entry that is fitted to them "
            "together, as a vocabulary with shared: true is"
        )
        problems.append(Problem(str(registry.path), entry.line, entry.field, message))
    if problems:
        raise RegistryError(problems)


def num_dense_inputs(registry: RunConfig, schema: FeatureSchema) -> int:
    """Return the columns of ``Batch.dense_features`` after preprocessing, which may widen features.

    Raises:
        RegistryError: as ``feature_steps``.
    """
    steps = feature_steps(registry, schema)
    return sum(math.prod(step.width for step in steps.get(name, ())) for name in schema.dense)


def _numbered_twice(
    registry: RunConfig, chains: Mapping[str, Sequence[Entry[Preprocessing]]]
) -> Iterator[Problem]:
    """Entries that number the numbers of an entry of the same plugin."""
    for name, chain in chains.items():
        first: dict[str, Entry[Preprocessing]] = {}
        for entry in chain:
            known = first.setdefault(entry.plugin.name, entry)
            if known is not entry and num_ids_of(entry.plugin) is not None:
                yield Problem(
                    str(registry.path),
                    entry.line,
                    f"{entry.field}.features",
                    f"{name} has its {entry.plugin.name} in {known.field} (line {known.line}), and "
                    "this one would number its numbers; leave the feature out of one",
                )


def build_preprocess(registry: RunConfig, schema: FeatureSchema) -> Preprocess:
    """Return the preprocessing of a registry, fitting the steps that are not fitted yet.

    Raises:
        DataError: a step is fitted, and the data is missing or wrong.
        PluginError: ``fit`` failed.
        RegistryError: a pattern matches no feature, or none that its step takes.
    """
    return Preprocess(fitted_steps(registry, schema), schema.dense)


def fitted_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return the fitted steps of each feature that has some, in file order.

    An entry that nobody has fitted yet is fitted to the rows as the entries before it leave them,
    the same in every process.

    Raises:
        DataError: the data is missing or wrong, or a step refuses it.
        PluginError: ``fit`` or a step before it failed.
        RegistryError: as ``feature_steps``.
    """
    steps = feature_steps(registry, schema)
    fitting = [entry.plugin for entry in _fitted_entries(registry)]
    stored = _StoredRows(
        registry,
        schema,
        Counter(
            (plugin.fit_rows, name)
            for plugin in fitting
            if plugin.fitted is None
            for name, chain in steps.items()
            if plugin in chain
        ),
    )
    for plugin in fitting:
        if plugin.fitted is None:
            claimed = {name: chain for name, chain in steps.items() if plugin in chain}
            # Not the plugin itself: where fitting fails and is tried again, it begins with nothing.
            shared = _unfitted(plugin)
            plugin.fitted = {
                name: _fitted(
                    stored,
                    shared if plugin.fits_together else _unfitted(plugin),
                    name,
                    chain[: chain.index(plugin)],
                )
                for name, chain in claimed.items()
            }
        for name, step in plugin.fitted.items():
            steps[name] = tuple(step if each is plugin else each for each in steps[name])
    return steps


def _fitted_entries(registry: RunConfig) -> list[Entry[Preprocessing]]:
    return [
        entry for entry in registry.preprocessing if type(entry.plugin).fit is not Preprocessing.fit
    ]


def _unfitted(plugin: Preprocessing) -> Preprocessing:
    return type(plugin)(plugin.options).placed(plugin.stands_at)


class _StoredRows:
    """Training rows of features as they are stored, read for many features at once.

    To read one column of a table takes about as long as to read all, so a pass over the table keeps
    the rows of as many features as fit into ``_KEPT_BYTES``. If those of one feature do not fit,
    each feature has a pass of its own, which keeps nothing.

    Args:
        wanted: how often each feature will be asked for, by the limit of rows and its name.
    """

    def __init__(self, registry: RunConfig, schema: FeatureSchema, wanted: Counter[_Key]) -> None:
        self._registry, self._schema, self._wanted = registry, schema, wanted
        self._kept: dict[_Key, list[_Jagged]] = {}
        self._keeps = True

    def of(
        self, feature: str, limit: int | None, advance: Callable[[int], None]
    ) -> Iterator[_Jagged]:
        """Yield values and lengths of a feature, some of its first ``limit`` rows at a time."""
        key = (limit, feature)
        self._wanted[key] -= 1
        if key in self._kept:
            for values, lengths in self._kept.pop(key):
                yield values, lengths
                advance(len(lengths))
        elif self._keeps and self._keep(feature, limit, advance):
            yield from self._kept.pop(key)
        else:
            for rows in training_rows(self._registry, limit):
                yield _jagged(rows, feature, self._schema)
                advance(len(rows))

    def _keep(self, first: str, limit: int | None, advance: Callable[[int], None]) -> bool:
        """Cache rows of ``first`` and of other features still needed.

        Return whether ``first`` fits in memory.
        """
        others = (
            name
            for (of, name), times in self._wanted.items()
            if of == limit and times and (of, name) not in self._kept
        )
        kept: dict[str, list[_Jagged]] = {name: [] for name in (first, *others)}
        size, read = sum(map(_num_bytes, self._kept.values())), 0
        for rows in training_rows(self._registry, limit):
            for name, parts in kept.items():
                parts.append(_jagged(rows, name, self._schema))
                size += _num_bytes(parts[-1:])
            while kept and size > _KEPT_BYTES:
                size -= _num_bytes(kept.popitem()[1])
            if not kept:
                self._keeps = bool(self._kept)
                advance(-read)  # they are read again
                return False
            advance(len(rows))
            read += len(rows)
        self._kept.update({(limit, name): parts for name, parts in kept.items()})
        return True


def _num_bytes(parts: Sequence[_Jagged]) -> int:
    return sum(values.nbytes + lengths.nbytes for values, lengths in parts)


def _fitted(
    stored: _StoredRows, step: Preprocessing, feature: str, before: Sequence[Preprocessing]
) -> Preprocessing:
    """``step``, fitted to ``feature`` behind the steps ``before``."""
    doing_it = f"fitting {step.name} to {feature}"
    with doing(doing_it, long=True), _bar(doing_it, step.fit_rows) as advance:
        of_data: list[RecdError] = []
        rows = _rows(stored.of(feature, step.fit_rows, advance), feature, before, of_data)
        with step_call(step, f"fit to {feature}", of_data):
            step.fit(feature, rows)
    return step


def _bar(what: str, rows: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """A bar of rows, in one of the ranks that all do the same."""
    if dist.is_initialized() and dist.get_rank():
        return nullcontext(lambda _: None)
    return row_progress(what, rows)


def _rows(
    stored: Iterator[_Jagged],
    feature: str,
    before: Sequence[Preprocessing],
    errors: list[RecdError],
) -> Iterator[_Jagged]:
    """Values and offsets of a feature's training rows behind the steps ``before``.

    Errors of reading are put into ``errors``, since they pass through the step that takes the rows.
    """
    try:
        for part in stored:
            values, lengths = apply_steps(before, [feature], *part)
            yield values, offsets_of(lengths)
    except RecdError as error:
        errors.append(error)
        raise


def _jagged(rows: Rows, feature: str, schema: FeatureSchema) -> _Jagged:
    """Values and lengths of a feature, sparse or dense, one number a row."""
    if feature in schema.sparse:
        kjt = kjt_from_columns({feature: sparse_column(rows, feature)}, len(rows))
        return kjt.values(), kjt.lengths()
    numbers = dense_features(rows, (feature,))
    only = FeatureSchema((), (feature,), schema.label)
    check_numbers(Batch(numbers, torch.zeros(len(rows))), only, rows)
    return numbers.flatten(), torch.ones(len(rows), dtype=torch.int32)


def fitted_state(registry: RunConfig) -> dict[str, Tensor]:
    """Return the fitted state of each entry that has one, as tensors that a checkpoint keeps."""
    found = {}
    for number, entry in _entries_with_state(registry):
        for feature, step in (entry.plugin.fitted or {}).items():
            of = "" if step.fits_together else feature
            with step_call(step, f"fitted_state of {feature}"):
                for name, tensor in step.fitted_state().items():
                    found[json.dumps([number, of, name])] = tensor.detach().cpu()
    return found


def load_fitted_state(registry: RunConfig, state: FittedState, entries: Collection[int]) -> None:
    """Load the state of entries in place of fitting; one that ``state`` lacks is left unfitted."""
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
    with step_call(step, f"load_fitted_state of {feature}"):
        step.load_fitted_state(state)
    return step


def _entries_with_state(registry: RunConfig) -> Iterator[tuple[int, Entry[Preprocessing]]]:
    for number, entry in enumerate(registry.preprocessing):
        if type(entry.plugin).fitted_state is not Preprocessing.fitted_state:
            yield number, entry
