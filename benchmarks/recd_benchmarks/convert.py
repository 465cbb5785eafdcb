"""What deduplication costs a converter, against assembling plain KJTs from the same columns.

Both sides make new tensors, as converters do. For large outputs glibc maps new memory each time,
which costs as much as the copy itself and falls on the larger output, so the figures ``_warm``
measure the same with an allocator that keeps freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from recd_benchmarks.batches import BATCH_SIZE, SCHEMA, papercal_batches
from recd_benchmarks.frame import Figure, Size, in_turn, keep_freed_memory
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugins.data.arrow import sparse_column
from recd_plugins.interfaces import Rows
from recd_plugins.sparse.dedup import Deduplicator, JaggedColumn
from recd_plugins.sparse.from_columns import ikjts_from_columns, kjt_from_columns

SUMMARY = "time of making IKJTs of a PAPERCAL batch, over that of a plain KJT"

Input = TypeVar("Input")
Groups = list[tuple[str, ...]]


def _num_batches(size: Size) -> int:
    return 4 if size == "small" else 12


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL clustered by session, {_num_batches(size)} batches of {BATCH_SIZE} rows, Arrow "
        "columns in memory, processor time of one thread, both sides in turn on each batch"
    )


def run(size: Size) -> list[Figure]:
    """Measure: tensors from decoded columns, and whole converters from Arrow to a Batch."""
    batches = papercal_batches(_num_batches(size))
    kjt = KjtConverter(KjtConverter.Options())
    ikjt, groups = _fitted(batches[0], min_dedupe_factor=1.5)
    # Ids of items repeat by chance, 1.7 times in a batch; this leaves them plain.
    _, user_groups = _fitted(batches[0], min_dedupe_factor=2)
    columns = [{name: sparse_column(rows, name) for name in SCHEMA.sparse} for rows in batches]
    deduplicate = Deduplicator()

    def assemble(batch: dict[str, JaggedColumn]) -> object:
        return kjt_from_columns(batch, BATCH_SIZE)

    def assemble_unique(groups: Groups, batch: dict[str, JaggedColumn]) -> object:
        plain = dict(batch)
        grouped = [{name: plain.pop(name) for name in group} for group in groups]
        return (
            ikjts_from_columns(grouped, BATCH_SIZE, deduplicate),
            kjt_from_columns(plain, BATCH_SIZE) if plain else None,
        )

    def convert(rows: Rows) -> object:
        return kjt.convert(rows, SCHEMA)

    def convert_unique(rows: Rows) -> object:
        return ikjt.convert(rows, SCHEMA)

    def figures(suffix: str, goal: float | None) -> list[Figure]:
        return [
            _ratio(f"ikjt_exact_over_kjt{suffix}", every, assemble, columns, goal),
            _ratio(f"ikjt_exact_over_kjt_items_plain{suffix}", users, assemble, columns, None),
            _ratio("ikjt_exact_over_recd_kjt" + suffix, convert_unique, convert, batches, None),
        ]

    every, users = partial(assemble_unique, groups), partial(assemble_unique, user_groups)
    result = figures("", 0.8)
    if keep_freed_memory():
        result += figures("_warm", None)
    return result


def _fitted(sample: Rows, min_dedupe_factor: float) -> tuple[IkjtConverter, Groups]:
    """A converter that has chosen its groups, and these."""
    options = {"min_dedupe_factor": min_dedupe_factor}
    ikjt = IkjtConverter(IkjtConverter.Options.model_validate(options))
    ikjt.fit(sample, SCHEMA)
    return ikjt, [group.features for group in ikjt.report() if group.deduplicated]


def _ratio(
    figure: str,
    numerator: Callable[[Input], object],
    denominator: Callable[[Input], object],
    inputs: Sequence[Input],
    goal: float | None,
) -> Figure:
    samples = [above / below for above, below in in_turn(numerator, denominator, inputs)]
    return Figure.of(figure, samples, unit="ratio", better="lower", goal=goal)
