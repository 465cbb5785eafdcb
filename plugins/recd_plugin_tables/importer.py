"""Converts tables to Parquet files in the cache folder; needs numba."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from recd_plugin_tables.converter import Converter
from recd_plugin_tables.imported import Imported, ImportNote, ImportPlace
from recd_plugin_tables.kinds import leaf_array, list_parts, plain
from recd_plugin_tables.labels import TaskSums
from recd_plugin_tables.plan import SESSION, TIME, ColumnPlan
from recd_plugin_tables.sources import Source
from recd_plugin_tables.spill import Spill, Splitter
from recd_plugin_tables.values import Texts
from recd_plugins.api import (
    DataError,
    Rows,
    SessionKeys,
    folders,
    list_dict,
    parquet_writer,
    progress_bars,
)

#: Bytes of rows that stay in memory while a table is read.
MEMORY = 1 << 29
# Table rows to convert at once if each has many candidates.
_CANDIDATE_ROWS = 2_048


def make_import(place: ImportPlace) -> Imported:
    """Return the import of a table. If it is missing, build it and show a progress bar."""
    if (found := place.find()) is not None:
        return found
    location = place.source.location
    waits = f"{location}: waiting for another process that imports this table"
    importer = _Importer(place)  # checks the columns
    with progress_bars.row_progress(f"importing {location}", place.source.num_rows) as bar:
        note = importer.make(bar, lambda: print(waits, file=sys.stderr))
    return Imported(place.folder, note, new=True)


class _Importer:
    def __init__(self, place: ImportPlace) -> None:
        self._place, self._source, self._options = place, place.source, place.options
        self._plan = plan = place.plan()
        features = {use.leaf.name: use.name for use in plan.features}
        self._histories = {
            name: each.model_copy(update={"of": features[str(each.of)]})
            for name, each in self._options.built_histories.items()
        }
        grouped = plan.session or plan.request or plan.explode
        self._clustered = self._options.order == "session" and bool(grouped)

    def make(self, progress: Callable[[int], None], waits: Callable[[], None]) -> ImportNote:
        """Build the import atomically. Calls ``waits`` while another process is building it."""
        target = self._place.folder
        with folders.work_folder(
            target, "import", self._place.identity, lambda _: None, waits=waits
        ) as work:
            if (found := ImportNote.read(target)) is not None:
                return found  # Another process built it meanwhile.
            shutil.rmtree(work.table, ignore_errors=True)
            work.table.mkdir()
            note = self._write(work.table, work.path / "spill", progress)
            note.write(work.table)
            work.publish(target)
        return note

    def _write(self, folder: Path, scratch: Path, progress: Callable[[int], None]) -> ImportNote:
        plan, scoring, texts = self._plan, self._place.scoring, Texts(folder / "texts")
        widths = _find_widths(self._source, plan, self._place.widths or {})
        converter = Converter(
            plan, self._place.labels, widths, self._options.on_nan, scoring=scoring, texts=texts
        )
        splitter = Splitter(self._options.split, plan.time.options.unit if plan.time else None)
        shutil.rmtree(scratch, ignore_errors=True)
        spill = Spill(
            scratch,
            converter.schema,
            MEMORY,
            order="session" if self._clustered or self._histories else "added",
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
        sums = TaskSums([use.options.task for use in plan.labels])
        counts, positives, times = self._write_splits(folder, spill, splitter, schema, sums)
        note = ImportNote(
            rows=num_rows,
            train=counts["train"],
            validation=counts["validation"],
            test=counts["test"],
            positives=positives.total(),
            train_positives=positives["train"],
            scoring=scoring,
            without_candidates=converter.without_candidates,
            dropped=dict(+converter.dropped),
            filled=dict(+converter.filled),
            empty=dict(+converter.empty),
            without_ids=dict(+converter.without_ids),
            widths=widths,
            files=list(files.items()),
            times=times,
            unlabelled=dict(+converter.unlabelled),
            task_means=sums.means(),
        )
        if not scoring:
            self._check(note)
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
        self,
        folder: Path,
        spill: Spill,
        splitter: Splitter,
        schema: pa.Schema,
        sums: TaskSums,
    ) -> tuple[Counter[str], Counter[str], dict[str, tuple[int, int]]]:
        """Write the splits.

        Returns:
            The rows of each split, its positives, and its first and last time in microseconds since
            1970.
        """
        times: dict[str, tuple[int, int]] = {}
        counts, positives = Counter[str](), Counter[str]()
        names = self._options.split_names
        layout: list_dict.Layout = "list_dict" if self._clustered else "list"
        with ExitStack() as files:
            writers = {
                name: files.enter_context(
                    parquet_writer.TableWriter(
                        folder / name / "rows.parquet",
                        schema,
                        keys=SessionKeys(SESSION, TIME),
                        layout=layout,
                    )
                )
                for name in names
            }
            for batch in spill.rows():
                masks = splitter.masks(batch)
                sums.add(batch, masks["train"])
                labels = batch[self._place.labels[0]].to_numpy()
                for split, chosen in masks.items():
                    if not chosen.any():
                        continue
                    if not self._plan.labels:
                        positives[split] += int(labels[chosen].sum())
                    kept = batch if chosen.all() else batch.filter(pa.array(chosen))
                    writers[split].write(kept)
                    counts[split] += kept.num_rows
                    if self._plan.time:
                        found = kept[TIME].to_numpy()
                        first, last = times.get(split, (found[0], found[0]))
                        times[split] = int(min(first, found.min())), int(max(last, found.max()))
        return counts, positives, times

    def _check(self, note: ImportNote) -> None:
        """Raise an error if a split is empty or all labels are equal."""
        where = self._source.location
        if not note.rows:
            raise DataError(f"{where}: the table has no rows. Use a table with at least one row.")
        for split in self._options.split_names:
            if getattr(note, split):
                continue
            empty = "training" if split == "train" else split
            raise DataError(
                f"{where}: the {empty} split is empty; the table has {note.rows:,} rows, of which "
                f"{sum(note.dropped.values()):,} were dropped for missing values. Change option "
                "'split' of the dataset."
            )
        for use in self._plan.labels:
            if use.options.name not in note.task_means:
                raise DataError(
                    f"{where}: label {use.options.name!r} of column {use.leaf.name!r} is missing "
                    "in every training row. Use another column, or remove the label from option "
                    "'label'."
                )
        label = self._plan.label
        given = label and (label.options.positive or label.options.positive_from is not None)
        if label is not None and given and note.positives in (0, note.kept):
            value = 1 if note.positives else 0
            raise DataError(
                f"{where}: every row gets label {value} from column {label.leaf.name!r}. Change "
                "option 'positive_from' or 'positive' of the column."
            )


def _find_widths(source: Source, plan: ColumnPlan, known: dict[str, int]) -> dict[str, int]:
    """Return the list length per ``numbers`` feature, from option ``width`` or the first list."""
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
        f"{source.location}: column {next(iter(waiting.values())).leaf.name!r} has only empty or "
        "null lists. Set the role of the column to 'unused'."
    )
