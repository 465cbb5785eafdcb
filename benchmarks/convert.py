"""Time to build IKJTs (deduplicated KeyedJaggedTensors), compared to plain KJTs.

Both sides create new tensors from the same columns, in memory that was freed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._measure import Findings, Size, in_turn, lower
from benchmarks._papercal import BATCH_SIZE, SCHEMA, list_dict_batch, papercal_batches
from recd_plugin_recd.ikjt import IkjtConverter, KjtConverter, ListDictConverter
from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugins.api import Rows
from recd_plugins.data.arrow import dictionary_column, sparse_column
from recd_plugins.runtime.machine import keep_freed_memory
from recd_plugins.sparse.dedup import Deduplicator, JaggedColumn
from recd_plugins.sparse.from_columns import (
    ikjts_from_columns,
    ikjts_from_dictionaries,
    kjt_from_columns,
    partial_from_columns,
)
from recd_plugins.sparse.partial import RowPacker

# Item ids repeat by chance, 1.7 times per batch. This limit keeps them plain.
_MIN_DEDUPE_FACTOR = 2
_BATCHES: dict[Size, int] = {"tiny": 1, "small": 4, "reference": 12}
_GOALS = {
    "ikjt_exact_over_kjt": 0.8,
    "ikjt_partial_over_kjt": 0.5,
    "ikjt_passthrough_over_kjt": 0.35,
}
Make = Callable[[Any], object]
Columns = dict[str, JaggedColumn]
#: Two functions to compare, and their inputs.
Pair = tuple[Make, Make, Sequence[Any]]


def run(size: Size) -> Findings:
    """Time building tensors from decoded columns, and complete converters from Arrow rows."""
    batches = papercal_batches(_BATCHES[size])
    stored = list(map(list_dict_batch, batches))
    columns: list[Columns] = [
        {name: sparse_column(rows, name) for name in SCHEMA.sparse} for rows in batches
    ]
    both = list(zip(columns, map(_dictionaries, stored), strict=True))
    least = {"min_dedupe_factor": _MIN_DEDUPE_FACTOR}
    kjt = KjtConverter(KjtConverter.Options())
    ikjt = IkjtConverter(IkjtConverter.Options.model_validate(least))
    partial = PartialIkjtConverter(PartialIkjtConverter.Options.model_validate(least))
    for converter in (ikjt, partial):
        converter.fit(batches[0], SCHEMA)
    keep_freed_memory()

    pairs: dict[str, Pair] = {
        "ikjt_exact_over_kjt": (_exact(ikjt), _plain, columns),
        "ikjt_partial_over_kjt": (_partial(partial), _plain, columns),
        "ikjt_passthrough_over_kjt": (_passthrough(stored[0]), lambda p: _plain(p[0]), both),
        "exact_converter_over_plain": (_convert(ikjt), _convert(kjt), batches),
        "partial_converter_over_plain": (_convert(partial), _convert(kjt), batches),
    }
    figures = [
        lower(
            name,
            [above / below for above, below in in_turn(one, other, inputs)],
            goal=_GOALS.get(name),
            paper="1.11 - 1.37" if name == "ikjt_exact_over_kjt" else None,
        )
        for name, (one, other, inputs) in pairs.items()
    ]
    return Findings(
        f"PAPERCAL clustered by session, {_BATCHES[size]} batches of {BATCH_SIZE} rows, Arrow "
        "columns in memory, CPU time of one thread, both sides alternate on each batch",
        figures,
    )


def _plain(columns: Columns) -> object:
    return kjt_from_columns(columns, BATCH_SIZE)


def _convert(converter: KjtConverter | IkjtConverter | PartialIkjtConverter) -> Make:
    return lambda rows: converter.convert(rows, SCHEMA)


def _exact(ikjt: IkjtConverter) -> Make:
    """Return a function that builds IKJTs (deduplicated KJTs), as chosen by the converter."""
    deduplicate = Deduplicator(neighbours_only=ikjt.neighbours_only)
    groups = [group.features for group in ikjt.report() if group.deduplicated]

    def make(columns: Columns) -> object:
        plain = dict(columns)
        grouped = [{name: plain.pop(name) for name in group} for group in groups]
        return ikjts_from_columns(grouped, BATCH_SIZE, deduplicate), plain and _plain(plain)

    return make


def _partial(partial: PartialIkjtConverter) -> Make:
    """Return a function that builds a partially deduplicated KJT, as chosen by the converter."""
    pack = RowPacker()
    names = [name for name, choice in partial.report().items() if choice.stored_partially]

    def make(columns: Columns) -> object:
        plain = dict(columns)
        packed = {name: plain.pop(name) for name in names}
        return partial_from_columns(packed, BATCH_SIZE, pack), plain and _plain(plain)

    return make


def _passthrough(sample: Rows) -> Make:
    """Return a function that builds deduplicated KJTs from Arrow dictionaries, without hashing."""
    converter = ListDictConverter(ListDictConverter.Options(min_dedupe_factor=_MIN_DEDUPE_FACTOR))
    converter.fit(sample, SCHEMA)
    groups = [group.features for group in converter.report() if group.deduplicated]
    grouped = {name for group in groups for name in group}

    def make(pair: tuple[Columns, Any]) -> object:
        columns, dictionaries = pair
        plain = {name: column for name, column in columns.items() if name not in grouped}
        stored = [{name: dictionaries[name] for name in group} for group in groups]
        return ikjts_from_dictionaries(stored, BATCH_SIZE), plain and _plain(plain)

    return make


def _dictionaries(rows: Rows) -> dict[str, Any]:
    columns = {name: dictionary_column(rows, name) for name in SCHEMA.sparse}
    return {name: column for name, column in columns.items() if column is not None}
