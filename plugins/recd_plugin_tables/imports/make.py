"""Makes an import of a table, once, or finds the one that is there."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recd_plugin_tables.imports.converter import Converter, OnNan
from recd_plugin_tables.imports.note import ImportNote
from recd_plugin_tables.imports.spill import HistoryOptions, Spill, SplitOptions, Splitter
from recd_plugin_tables.kinds import leaf_array, list_parts, plain
from recd_plugin_tables.plan import SESSION, TIME, ColumnPlan
from recd_plugin_tables.sources import Source
from recd_plugin_tables.values import Texts
from recd_plugins.api import DataError, Layout, Rows, SessionKeys, TableWriter, work_folder

#: Bytes of rows that stay in memory while a table is read.
MEMORY = 1 << 29
# Rows of the table that are made at once where each has many candidates.
_CANDIDATE_ROWS = 2_048


class Importer:
    """Imports a table into the cache.

    Args:
        source: the table.
        plan: the use of each column.
        label: name of the label column.
        on_nan: rule for missing or infinite numbers.
        split: into training and test; None: all rows are for training.
        clustered: whether to sort rows by session.
        widths: known list lengths of features that are lists of numbers.
        scoring: whether to keep every row, also without a label.
        histories: options by feature name; ``of`` names a column.
    """

    def __init__(
        self,
        source: Source,
        plan: ColumnPlan,
        *,
        label: str,
        on_nan: OnNan,
        split: SplitOptions | None,
        clustered: bool,
        widths: dict[str, int] | None = None,
        scoring: bool = False,
        histories: Mapping[str, HistoryOptions] | None = None,
    ) -> None:
        self._source, self._plan, self._label = source, plan, label
        features = {use.leaf.name: use.name for use in plan.features}
        self._histories = {
            name: each.model_copy(update={"of": features[each.of]})
            for name, each in (histories or {}).items()
        }
        self._on_nan: OnNan = on_nan
        self._split, self._clustered, self._scoring = split, clustered, scoring
        self._widths = widths or {}

    def make(
        self,
        target: Path,
        identity: dict[str, Any],
        progress: Callable[[int], None],
        waits: Callable[[], None],
    ) -> ImportNote:
        """Write the import to ``target``, whole or not at all.

        Another process that makes it is waited for, after a call of ``waits``: all ranks of a
        trainer may begin with it.
        """
        with work_folder(target, "import", identity, lambda _: None, waits=waits) as work:
            if (found := ImportNote.read(target)) is not None:
                return found  # which another process made meanwhile
            shutil.rmtree(work.table, ignore_errors=True)
            work.table.mkdir()
            note = self._write(work.table, work.path / "spill", progress)
            note.write(work.table)
            work.publish(target)
        return note

    def _write(self, folder: Path, scratch: Path, progress: Callable[[int], None]) -> ImportNote:
        plan, texts = self._plan, Texts(folder / "texts")
        widths = find_widths(self._source, plan, self._widths)
        converter = Converter(
            plan, self._label, widths, self._on_nan, scoring=self._scoring, texts=texts
        )
        splitter = Splitter(self._split, plan.time.options.unit if plan.time else None)
        shutil.rmtree(scratch, ignore_errors=True)
        by_session = self._clustered or bool(self._histories)
        spill = Spill(
            scratch,
            converter.schema,
            MEMORY,
            order="session" if by_session else "added",
            histories=self._histories,
        )
        num_rows = 0
        files: Counter[str] = Counter()
        for rows in self._rows():
            for origin in rows.origins:
                files[origin.path] += origin.num_rows
            batch = converter.convert(rows, num_rows)
            num_rows += len(rows)
            splitter.see(batch)
            spill.add(batch)
            progress(len(rows))
        texts.close()
        schema = converter.schema
        for name in self._histories:
            schema = schema.append(pa.field(name, pa.list_(pa.int64())))
        if self._histories and not self._clustered:
            built = spill
            spill = Spill(scratch / "rows", schema, MEMORY, order="row", num_rows=num_rows)
            for batch in built.rows():
                spill.add(batch.cast(schema))
        counts, times = self._write_splits(folder, spill, splitter, schema)
        if not num_rows and not self._scoring:
            raise DataError(f"{self._source.location}: the table has no rows")
        note = ImportNote(
            rows=num_rows,
            train=counts["train"],
            test=counts["test"],
            positives=counts["positives"],
            train_positives=counts["train_positives"],
            scoring=self._scoring,
            without_candidates=converter.without_candidates,
            dropped=dict(+converter.dropped),
            filled=dict(+converter.filled),
            widths=widths,
            files=list(files.items()),
            times=times,
        )
        self._check(note, counts)
        return note

    def _rows(self) -> Iterator[Rows]:
        for rows in self._source.read(self._plan.columns):
            if not self._plan.explode:
                yield rows
                continue
            for start in range(0, len(rows), _CANDIDATE_ROWS):
                path, row = rows.origin_of(start)
                part = rows.data.slice(start, _CANDIDATE_ROWS)
                yield Rows(part, (type(rows.origins[0])(path, row, part.num_rows),))

    def _write_splits(
        self, folder: Path, spill: Spill, splitter: Splitter, schema: pa.Schema
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Write both splits."""
        times: dict[str, tuple[int, int]] = {}
        counts = {"train": 0, "test": 0, "positives": 0, "train_positives": 0}
        ids = dict.fromkeys(self._id_features, 0)
        with ExitStack() as files:
            train = files.enter_context(self._writer(folder / "train", schema))
            test = None
            if self._split is not None:
                test = files.enter_context(self._writer(folder / "test", schema))
            for batch in spill.rows():
                in_test = splitter.test_rows(batch)
                labels = batch[self._label].to_numpy()
                counts["positives"] += int(labels.sum())
                counts["train_positives"] += int(labels[~in_test].sum())
                for name in ids:
                    ids[name] += len(batch[name].flatten())
                for split, writer, chosen in (("train", train, ~in_test), ("test", test, in_test)):
                    if writer is not None and chosen.any():
                        kept = batch if chosen.all() else batch.filter(pa.array(chosen))
                        writer.write(kept)
                        if self._plan.time:
                            found = kept[TIME].to_numpy()
                            before = times.get(split, (found[0], found[0]))
                            times[split] = (
                                int(min(before[0], found.min())),
                                int(max(before[1], found.max())),
                            )
                counts["test"] += int(in_test.sum())
                counts["train"] += int((~in_test).sum())
        return {**counts, **{f"ids of {name}": count for name, count in ids.items()}}, times

    def _writer(self, folder: Path, schema: pa.Schema) -> TableWriter:
        keys = SessionKeys(SESSION, TIME)
        layout: Layout = "list_dict" if self._clustered else "list"
        return TableWriter(folder / "rows.parquet", schema, keys=keys, layout=layout)

    @property
    def _id_features(self) -> list[str]:
        ids = [use.name for use in self._plan.features if use.options.feature in ("id", "ids")]
        return [*ids, *self._histories]

    def _check(self, note: ImportNote, counts: dict[str, int]) -> None:
        """Refuse an import that nothing can be learnt from."""
        where = self._source.location
        if self._scoring:
            return
        if not note.train or (self._split is not None and not note.test):
            empty = "training" if not note.train else "test"
            raise DataError(
                f"{where}: of {note.rows:,} rows none is in the {empty} split, and "
                f"{sum(note.dropped.values()):,} were left out for missing values; choose another "
                "split:"
            )
        for use in self._plan.features:
            if not counts.get(f"ids of {use.name}", 1):
                raise DataError(
                    f"{where}: column {use.leaf.name} has no value in any of {note.rows:,} rows; "
                    "mark it unused"
                )
        for name in self._histories:
            if not counts[f"ids of {name}"]:
                raise DataError(
                    f"{where}: history {name} is empty in all of {note.rows:,} rows: no session "
                    "has rows with different times. Set its option ties: stored, or remove it"
                )
        label = self._plan.label
        given = label and (label.options.positive or label.options.positive_from is not None)
        if label is not None and given and note.positives in (0, note.train + note.test):
            every = "no row is" if not note.positives else "every row is"
            raise DataError(f"{where}: {every} positive by column {label.leaf.name}")


def find_widths(source: Source, plan: ColumnPlan, known: dict[str, int]) -> dict[str, int]:
    """How many numbers the lists of each such feature hold: its ``width``, or the first list's."""
    widths = dict(known)
    waiting = {}
    for use in plan.features:
        if use.options.feature != "numbers" or use.name in widths:
            continue
        kind = plain(use.leaf.type)
        if use.options.width is not None:
            widths[use.name] = use.options.width
        elif pa.types.is_fixed_size_list(kind):
            widths[use.name] = kind.list_size
        else:
            waiting[use.name] = use
    if not waiting:
        return widths
    for batch in source.batches(sorted({use.leaf.path[0] for use in waiting.values()})):
        for name, use in list(waiting.items()):
            column = batch[use.leaf.path[0]]
            values = leaf_array(list_parts(column)[1] if use.leaf.exploded else column, use.leaf)
            lengths = np.diff(list_parts(values.drop_null())[0])
            if lengths.any():
                widths[name] = int(lengths[lengths > 0][0])
                del waiting[name]
        if not waiting:
            return widths
    raise DataError(
        f"{source.location}: column {next(iter(waiting.values())).leaf.name} has no list in any "
        "row; mark it unused"
    )
