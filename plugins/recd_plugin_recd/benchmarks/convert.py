"""What deduplication costs a converter, against assembling plain KJTs from the same columns.

Both sides make new tensors, as converters do, with an allocator that keeps freed memory, so that
buffers are used again. In the figures ``_fresh`` it does not: glibc then maps large outputs anew
each time, which costs as much as the copy itself and falls on the larger output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from recd_plugin_recd.benchmarks.batches import (
    BATCH_SIZE,
    SCHEMA,
    list_dict_batch,
    papercal_batches,
)
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugin_recd.list_dict import ListDictConverter
from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugins.api import Rows
from recd_plugins.api.batches import (
    ikjts_from_columns,
    ikjts_from_dictionaries,
    kjt_from_columns,
    partial_from_columns,
    partial_from_dictionaries,
)
from recd_plugins.api.columns import (
    Deduplicator,
    DictionaryColumn,
    JaggedColumn,
    RowPacker,
    dictionary_column,
    sparse_column,
)
from recd_plugins.testing.benchmark import Figure, Size, in_turn, keep_freed_memory

SUMMARY = "time of making IKJTs of a PAPERCAL batch, over that of a plain KJT"

#: Ids of items repeat by chance, 1.7 times in a batch: this leaves them plain.
_MIN_DEDUPE_FACTOR = 2
_PAPER = "1.11 - 1.37"

Input = TypeVar("Input")
Columns = dict[str, JaggedColumn]
Dictionaries = dict[str, DictionaryColumn]


def _num_batches(size: Size) -> int:
    return {"tiny": 1, "small": 4, "reference": 12}[size]


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL clustered by session, {_num_batches(size)} batches of {BATCH_SIZE} rows, Arrow "
        "columns in memory, processor time of one thread, both sides in turn on each batch"
    )


def run(size: Size) -> list[Figure]:
    """Measure: tensors from decoded columns, and whole converters from Arrow to a Batch."""
    batches = papercal_batches(_num_batches(size))
    columns = [{name: sparse_column(rows, name) for name in SCHEMA.sparse} for rows in batches]
    stored = list(map(list_dict_batch, batches))
    kjt = KjtConverter(KjtConverter.Options())
    ikjt = IkjtConverter(IkjtConverter.Options(min_dedupe_factor=_MIN_DEDUPE_FACTOR))
    every = IkjtConverter(IkjtConverter.Options())
    partial = PartialIkjtConverter(
        PartialIkjtConverter.Options(min_dedupe_factor=_MIN_DEDUPE_FACTOR)
    )
    for converter in (ikjt, every, partial):
        converter.fit(batches[0], SCHEMA)
    exact, exact_items = _exact(ikjt), _exact(every)
    packed = _partial(partial)

    passed_on, packed_on = _passthrough(stored[0]), _partial_passthrough(partial)
    both = list(zip(columns, map(_dictionaries, stored), strict=True))

    def figures(
        suffix: str, goals: tuple[float | None, float | None, float | None]
    ) -> list[Figure]:
        return [
            _ratio(f"ikjt_exact_over_kjt{suffix}", exact, _plain, columns, goals[0], _PAPER),
            _ratio(f"ikjt_partial_over_kjt{suffix}", packed, _plain, columns, goals[1]),
            _ratio(
                f"ikjt_passthrough_over_kjt{suffix}",
                lambda pair: passed_on(*pair),
                lambda pair: _plain(pair[0]),
                both,
                goals[2],
            ),
            _ratio(
                f"ikjt_partial_passthrough_over_kjt{suffix}",
                lambda pair: packed_on(*pair),
                lambda pair: _plain(pair[0]),
                both,
            ),
            _ratio(f"ikjt_exact_items_too_over_kjt{suffix}", exact_items, _plain, columns),
            _ratio(f"exact_converter_over_plain{suffix}", _convert(ikjt), _convert(kjt), batches),
            _ratio(
                f"partial_converter_over_plain{suffix}", _convert(partial), _convert(kjt), batches
            ),
        ]

    fresh = figures("_fresh", (None, None, None))
    return figures("", (0.8, 0.5, 0.35)) + fresh if keep_freed_memory() else fresh


def _plain(columns: Columns) -> object:
    return kjt_from_columns(columns, BATCH_SIZE)


def _exact(ikjt: IkjtConverter) -> Callable[[Columns], object]:
    """The groups that a converter chose as IKJTs, the rest plain."""
    deduplicate = Deduplicator(neighbours_only=ikjt.neighbours_only)
    groups = [group.features for group in ikjt.report() if group.deduplicated]

    def make(columns: Columns) -> object:
        plain = dict(columns)
        grouped = [{name: plain.pop(name) for name in group} for group in groups]
        return ikjts_from_columns(grouped, BATCH_SIZE, deduplicate), plain and _plain(plain)

    return make


def _partial(partial: PartialIkjtConverter) -> Callable[[Columns], object]:
    """The features that a converter chose as a partial IKJT, the rest plain."""
    pack = RowPacker()
    names = [name for name, choice in partial.report().items() if choice.stored_partially]

    def make(columns: Columns) -> object:
        plain = dict(columns)
        packed = {name: plain.pop(name) for name in names}
        return partial_from_columns(packed, BATCH_SIZE, pack), plain and _plain(plain)

    return make


def _passthrough(sample: Rows) -> Callable[[Columns, Dictionaries], object]:
    """The groups that a converter chose straight from dictionaries and codes, the rest plain."""
    converter = ListDictConverter(ListDictConverter.Options(min_dedupe_factor=_MIN_DEDUPE_FACTOR))
    converter.fit(sample, SCHEMA)
    groups = [group.features for group in converter.report() if group.deduplicated]
    grouped = {name for group in groups for name in group}

    def make(columns: Columns, dictionaries: Dictionaries) -> object:
        plain = {name: column for name, column in columns.items() if name not in grouped}
        stored = [{name: dictionaries[name] for name in group} for group in groups]
        return ikjts_from_dictionaries(stored, BATCH_SIZE), plain and _plain(plain)

    return make


def _partial_passthrough(
    partial: PartialIkjtConverter,
) -> Callable[[Columns, Dictionaries], object]:
    """The features that a converter chose as a partial IKJT from dictionaries, the rest plain."""
    pack = RowPacker()
    names = [name for name, choice in partial.report().items() if choice.stored_partially]

    def make(columns: Columns, dictionaries: Dictionaries) -> object:
        plain = {name: column for name, column in columns.items() if name not in names}
        stored = {name: dictionaries[name] for name in names}
        return partial_from_dictionaries(stored, BATCH_SIZE, pack), plain and _plain(plain)

    return make


def _dictionaries(rows: Rows) -> Dictionaries:
    columns = {name: dictionary_column(rows, name) for name in SCHEMA.sparse}
    return {name: column for name, column in columns.items() if column is not None}


def _convert(
    converter: KjtConverter | IkjtConverter | PartialIkjtConverter,
) -> Callable[[Rows], object]:
    return lambda rows: converter.convert(rows, SCHEMA)


def _ratio(
    figure: str,
    numerator: Callable[[Input], object],
    denominator: Callable[[Input], object],
    inputs: Sequence[Input],
    goal: float | None = None,
    paper: str | None = None,
) -> Figure:
    samples = [above / below for above, below in in_turn(numerator, denominator, inputs)]
    return Figure.of(figure, samples, unit="ratio", better="lower", paper=paper, goal=goal)
