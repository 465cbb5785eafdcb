"""Steps of preprocessing that are fitted to the training rows, once in a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugins.activity import doing
from recd_plugins.data.apply_step import apply_steps, step_call
from recd_plugins.data.arrow import dense_features, sparse_column
from recd_plugins.data.check_numbers import check_numbers
from recd_plugins.data.feature_steps import Steps, feature_steps
from recd_plugins.data.training_rows import training_rows
from recd_plugins.errors import PluginError, RecdError
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Rows
from recd_plugins.progress import row_progress
from recd_plugins.registry import RunConfig
from recd_plugins.sparse.from_columns import kjt_from_columns
from recd_plugins.sparse.jagged import offsets_of
from recd_plugins.values.batch import Batch

# Of the rows of features that one pass over the table keeps in memory.
_KEPT_BYTES = 1 << 28

_Jagged = tuple[Tensor, Tensor]


def fitted_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """The steps of each feature that has some, those that are fitted being so; in file order.

    An entry is fitted where nobody has yet: to the rows as the entries before it leave them, the
    same in every process.

    Raises:
        DataError: the data is missing or wrong, or a step refuses it.
        PluginError: ``fit`` or a step before it failed, or what was fitted has no identity.
        RegistryError: as ``feature_steps``.
    """
    steps = feature_steps(registry, schema)
    fitting = [
        entry.plugin
        for entry in registry.preprocessing
        if type(entry.plugin).fit is not Preprocessing.fit
    ]
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

    def __init__(
        self,
        registry: RunConfig,
        schema: FeatureSchema,
        wanted: Counter[tuple[int | None, str]],
    ) -> None:
        self._registry, self._schema, self._wanted = registry, schema, wanted
        self._kept: dict[tuple[int | None, str], list[_Jagged]] = {}
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
    stored: _StoredRows,
    step: Preprocessing,
    feature: str,
    before: Sequence[Preprocessing],
) -> Preprocessing:
    """``step``, fitted to ``feature`` behind the steps ``before``."""
    what, doing_it = f"fit to {feature}", f"fitting {step.name} to {feature}"
    with doing(doing_it, long=True), _bar(doing_it, step.fit_rows) as advance:
        of_data: list[RecdError] = []
        rows = _rows(stored.of(feature, step.fit_rows, advance), feature, before, of_data)
        with step_call(step, what, of_data):
            step.fit(feature, rows)
    with step_call(step, f"identity after {what}"):
        identity = step.identity()
    if not identity:
        raise PluginError(
            f"{step.title}: identity is empty after {what}: nobody could tell whether a run goes "
            "on by what its checkpoint learnt by; return a digest of what fit decided"
        )
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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Values and offsets of a feature's training rows behind the steps ``before``.

    What reading raises is put into ``errors``, since it goes through the step that takes the rows.
    """
    try:
        for part in stored:
            values, lengths = apply_steps(before, [feature], *part)
            yield values, offsets_of(lengths)
    except RecdError as error:
        errors.append(error)
        raise


def _jagged(rows: Rows, feature: str, schema: FeatureSchema) -> tuple[Tensor, Tensor]:
    """Values and lengths of a feature, sparse or dense, one number a row."""
    if feature in schema.sparse:
        kjt = kjt_from_columns({feature: sparse_column(rows, feature)}, len(rows))
        return kjt.values(), kjt.lengths()
    numbers = dense_features(rows, (feature,))
    only = FeatureSchema((), (feature,), schema.label)
    check_numbers(Batch(numbers, torch.zeros(len(rows))), only, rows)
    return numbers.flatten(), torch.ones(len(rows), dtype=torch.int32)
