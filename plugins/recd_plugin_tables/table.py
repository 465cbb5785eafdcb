"""Dataset ``tables.table``."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, NonNegativeInt, model_validator

from recd_plugin_tables.imported import Imported, ImportOptions, ImportPlace, SourceRows
from recd_plugin_tables.kinds import (
    RULES,
    ColumnOptions,
    Leaf,
    feature_name,
    holds_nothing,
    is_constant,
    is_list,
    is_text,
    leaf_array,
    leaves,
    list_parts,
    plain,
    sort_of,
    type_of_sort,
)
from recd_plugin_tables.plan import CANDIDATE, REQUEST, ROW, SESSION, TIME, PlanError, key_name
from recd_plugin_tables.sources import Source, has_local_files
from recd_plugin_tables.sources.text import is_number
from recd_plugin_tables.values import missing_id
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Reader,
    RecdError,
    Rows,
    SessionKeys,
    Split,
    Storage,
    object_stores,
    parquet,
    readers,
)

if TYPE_CHECKING:
    from recd_plugin_tables.histories.windows import StoredHistories

# Columns that score files always have.
_OF_SCORES = frozenset({"row", "candidate", "score"})


class Table(Dataset):
    """Dataset for a table in any supported format, which is imported to Parquet before training.

    Option ``columns`` assigns a role to each column.
    """

    name = "tables.table"
    free_options = frozenset({"path", "test_path", "source", "cache", "prefetch"})
    row_options = frozenset({"split", "order", "on_nan", "shuffle", "seed"})

    class Options(ImportOptions):
        path: Path | object_stores.Url = Field(
            description="The table: Parquet, CSV, TSV, JSON lines, Arrow or Feather; a folder"
            " of these; an Iceberg, Delta or Lance table; a saved Hugging Face "
            "dataset; a DuckDB file; or a URL of one."
        )
        test_path: Path | object_stores.Url | None = Field(
            default=None,
            description="A separate table for the test split. Replaces split.test.",
        )
        shuffle: bool = Field(default=False, description="Shuffle row groups in each epoch.")
        seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
        prefetch: NonNegativeInt = Field(
            default=4,
            description="Number of batches to prefetch in a thread. 0 reads in the trainer's "
            "thread.",
        )

        @model_validator(mode="before")
        @classmethod
        def _one_test_split(cls, given: Any) -> Any:
            if isinstance(given, dict) and given.get("test_path") is not None:
                split = given.get("split")
                if not (isinstance(split, dict) and split.get("validation")):
                    return {**given, "split": None}
                return {**given, "split": {**split, "test": 0, "test_from": None}}
            return given

    options: Options
    #: The dataset that the model was trained on, if this table is scored; else None.
    _trained: Table | None = None
    _told = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.row_options |= {f"histories.{name}.store" for name in options.stored_histories}

    def prepare(self) -> None:
        places = [(self._train, self._place)]
        if self.options.test_path is not None:
            places.append((self._test, self._place_of_test()))
        lines = [
            line
            for each, place in places
            if each.new
            for line in each.note.lines(place.source.location, is_test=place is not self._place)
        ]
        if lines and len(places) > 1:
            lines += self._train.note.time_leak(self._test.note.times.get("train"))
        if (stored := self._stored) is not None:
            known = {leaf.name: sort_of(leaf.type) for leaf in self._leaves()}
            pairs = (pair for each, _ in places for pair in each.note.times.values())
            times = [time for pair in pairs for time in pair]
            table = self._table_of("train")
            schema = pa.schema([table.schema.field(name) for name in stored.keys])
            pieces = [readers.Piece(unit, 0, min(unit.num_rows, 10_000)) for unit in table.units]
            is_rank = multiprocessing.parent_process() is not None  # another process says it
            rows = None if is_rank else next(table.read(pieces[:1], schema), None)
            lines += stored.check(known, times or [0], self.options.path, rows)
        if not self._told and lines:
            print(*lines, sep="\n", file=sys.stderr)
        self._told = True

    def mistakes(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """Return option paths and error texts, if the options do not match the table's columns."""
        path, test_path, source = self.options.path, self.options.test_path, self.options.source
        try:
            if not has_local_files(path, source):
                return ()
            if self._place.find() is None:
                self._place.plan()
            if test_path is not None and has_local_files(test_path, source):
                self._place_of_test().plan()
        except PlanError as error:
            return error.problems
        except RecdError:  # Missing files are reported when they are needed.
            pass
        return ()

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {split: self._table_of(split).contents() for split in self.splits()}
        return found if self._stored is None else found | {"histories": self._stored.contents()}

    def schema(self) -> FeatureSchema:
        """Return the feature schema, in the order of option ``columns``, followed by histories."""
        sparse, dense = [], []
        for name, use in self._features():
            if use.feature in ("id", "ids"):
                sparse.append(name)
            elif use.feature == "number":
                dense.append(name)
            else:
                width = use.width or self.widths[name]
                dense += [f"{name}_{index}" for index in range(width)]
        sparse += self.options.histories
        of_tasks = tuple(each.task for each in self.options.label)
        return FeatureSchema(tuple(sparse), tuple(dense), self._labels[0], of_tasks)

    def known_schema(self) -> FeatureSchema | None:
        uses = [use for _, use in self._features()]
        has_widths = not any(use.feature == "numbers" and use.width is None for use in uses)
        return self.schema() if has_widths or self._place.find() else None

    def _features(self) -> list[tuple[str, ColumnOptions]]:
        columns = self.options.columns.items()
        return [(use.name or feature_name(c), use) for c, use in columns if use.feature]

    def left_out(self) -> dict[str, str]:
        columns = self.options.columns.items()
        return {name: "has the role 'unused'" for name, use in columns if use.roles == ("unused",)}

    def splits(self) -> tuple[Split, ...]:
        separate = self.options.test_path is not None
        return (*self.options.split_names, *(("test",) if separate else ()))

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        return self._reader(self._columns(), rank, world_size, batch_size, split)

    def session_reader(
        self, *, rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        if (keys := self.session_keys()) is None:
            return super().session_reader(
                rank=rank, world_size=world_size, batch_size=batch_size, split=split
            )
        columns = self._columns(*sorted(keys.groups))
        return self._reader(columns, rank, world_size, batch_size, split)

    def label_mean(self) -> float | None:
        try:
            found = self._place.find()
        except RecdError:  # the table of a trained model was deleted
            return None
        if found is None or self.options.label:
            return None
        return found.note.train_positives / found.note.train

    def task_means(self) -> Mapping[str, float]:
        try:
            found = self._place.find()
        except RecdError:  # the table of a trained model was deleted
            return {}
        return {} if found is None else found.note.task_means

    def session_keys(self) -> SessionKeys | None:
        roles = {role for use in self.options.columns.values() for role in use.roles}
        grouped = self.options.explode or roles & {"session", "request"}
        request = REQUEST if "request" in roles else None
        return SessionKeys(SESSION, TIME, request) if grouped else None

    def keys(self) -> dict[str, str]:
        """Return a dict from import column to its name in score files.

        Includes key columns and, with ``explode``, the numbers of row and candidate.
        """
        own = {key_name(column, use): column for column, use in self.options.columns.items()}
        if self._trained is not None:  # a table to score may lack some of them
            there = self._table_of("train").schema.names
            own = {name: column for name, column in own.items() if name in there}
        scores = _OF_SCORES.union(f"score_{each.name}" for each in self.options.label)
        candidate = {ROW: "row", CANDIDATE: "candidate"} if self.options.explode else {}
        return candidate | {
            name: f"{column}_key" if column in scores else column
            for name, column in own.items()
            if name
        }

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        table = self._table_of(split)
        keys = self.session_keys()
        session = (*sorted(keys.groups), TIME) if keys is not None else ()
        columns = self._columns(*session, *self.keys())
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in table.units)
        return self._read(split, pieces, columns)

    def storage(self) -> Storage:
        return self.options.source.storage

    def to_score(self, location: str) -> Table:
        """Return a dataset that reads all rows of another table in stored order, for scoring."""
        changed = {"path": location, "test_path": None, "split": None, "order": "stored"}
        given = self.options.model_dump(by_alias=True) | changed
        scored = type(self)(type(self.options).model_validate(given))
        scored._trained = self
        return scored

    def __getstate__(self) -> dict[str, Any] | None:
        return {
            "_trained": self._trained,
            "trained_schema": self.trained_schema,
            "trained_kinds": dict(self.trained_kinds),
        }

    def texts(self, feature: str) -> dict[int, str]:
        """Return a dict from id to text for a feature, or {} without option ``texts: true``."""
        uses = [use for name, use in self._features() if name == feature and use.texts]
        if not uses:
            return {}
        filled = {use.missing for use in uses if isinstance(use.missing, str)}
        found = {missing_id(text): text for text in filled.difference(RULES)}
        path = self._train.folder / "texts" / f"{feature}.parquet"
        if path.is_file():
            ids, texts = (column.to_pylist() for column in pq.read_table(path).columns)
            found.update(zip(ids, texts, strict=True))
        return found

    def encodings(self) -> list[dict[str, Any]]:
        """Return how to encode the features of raw rows, for ``recd export``."""
        from recd_plugin_tables.encoding import encodings

        trained = self._trained or self
        known = trained.kinds() or trained.trained_kinds
        types = {
            name: type_of_sort(known.get(name) or ("times" if use.by else "numbers"))
            for name, use in self.options.columns.items()
        }
        types |= {leaf.name: leaf.type for leaf in trained._leaves()}
        types |= {
            name: type_of_sort(known.get(name, "numbers")) for name in self.options.stored_histories
        }
        found = encodings(self.options, types, trained.widths)
        try:
            empty_is_null = trained._place.source.empty_is_null
        except RecdError:  # the table is missing
            path = str(trained.options.path).lower().removesuffix(".gz").removesuffix(".zst")
            empty_is_null = path.endswith((".csv", ".tsv"))
            empty_is_null |= trained.options.source.format in ("csv", "tsv")
        with_gaps = trained._columns_with_gaps()
        for one in found:
            if one["kind"] in ("id", "ids") and one["column"] in with_gaps:
                one["optional"] = True
            if empty_is_null and one["value"] in ("text", "digits"):
                one["empty_is_missing"] = True
        return found

    def sample_request(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return JSON values by column: of columns shared by all candidates, and of one candidate.

        Each value is the first one of its column that is not missing. Without exploded lists,
        shared columns are constant in each request, or session, of the first rows.
        """
        from recd_plugin_tables.encoding import json_value

        trained = self._trained or self
        columns, source = trained.options.columns, trained._place.source
        known = {leaf.name: leaf for leaf in leaves(source.schema, trained.options.explode)}
        used = {name: known[name] for name, use in columns.items() if use.feature}
        group = next(
            (known[n] for r in ("request", "session") for n, u in columns.items() if r in u.roles),
            None,
        )
        read = {leaf.path[0] for leaf in (*used.values(), *([group] if group else ()))}
        rows = next(iter(source.batches(sorted(read))))
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, leaf in used.items():
            column = rows[leaf.path[0]]
            values = leaf_array(list_parts(column)[1] if leaf.exploded else column, leaf)
            of_candidate = leaf.exploded
            if not trained.options.explode:
                grouped = {"session", "request", "time", "ids"} & set(columns[name].roles)
                keys = None if group is None else leaf_array(rows[group.path[0]], group)
                of_candidate = not grouped and (keys is None or not is_constant(keys, values))
            (own if of_candidate else shared)[name] = json_value(values.drop_null()[:1])
        for name, history in trained.options.built_histories.items():
            shared[name] = [({**shared, **own})[str(history.of)]]
        if trained._stored is not None:
            shared |= {name: [each.sample] for name, each in trained._stored.items().items()}
        return shared, own

    def _columns_with_gaps(self) -> set[str]:
        """Return the columns with missing values in training; empty if the import is missing."""
        try:
            imported = self._place.find()
        except RecdError:  # the table is missing
            imported = None
        return {*imported.note.empty, *imported.note.filled} if imported else set()

    @property
    def widths(self) -> dict[str, int]:
        """List length of each feature that is a list of numbers, keyed by feature name."""
        if self._trained is not None:
            return self._trained.widths
        if self.trained_schema is not None:
            numbers = {name for name, use in self._features() if use.feature == "number"}
            parts = [name for name in self.trained_schema.dense if name not in numbers]
            return dict(Counter(name.rpartition("_")[0] for name in parts))
        return dict(self._train.note.widths)

    @property
    def _labels(self) -> tuple[str, ...]:
        if self.options.label:
            return tuple(each.name for each in self.options.label)
        labels = [name for name, use in self.options.columns.items() if "label" in use.roles]
        return (feature_name(labels[0]) if labels else "label",)

    @cached_property
    def _train(self) -> Imported:
        if self._trained is not None:
            known = self._trained.kinds() or self._trained.trained_kinds
            self._check_kinds(self._place.source, known, self._trained.options.path)
        return self._made(self._place)

    @cached_property
    def _test(self) -> Imported:
        return self._made(self._place_of_test(dict(self._train.note.widths)))

    @staticmethod
    def _made(place: ImportPlace) -> Imported:
        from recd_plugin_tables.importer import make_import

        return place.find() or make_import(place)

    @cached_property
    def _place(self) -> ImportPlace:
        path, options = self.options.path, self.options
        if self._trained is None:
            return ImportPlace(path, options, self._labels)
        # The training table is not needed if the options are complete.
        unsaid = any(u.feature == "numbers" and u.width is None for u in options.columns.values())
        widths = self.widths if unsaid else None
        trained = self._trained._types_known()
        return ImportPlace(path, options, self._labels, widths, scoring=True, trained=trained)

    def _place_of_test(self, widths: dict[str, int] | None = None) -> ImportPlace:
        """Return the location of the import of table ``test_path``."""
        assert self.options.test_path is not None
        options = self.options.model_copy(update={"split": None})
        place = ImportPlace(
            self.options.test_path, options, self._labels, widths, trained=self._types_known()
        )
        self._check_kinds(place.source, self.kinds(), self._place.source.location)
        return place

    def _types_known(self) -> dict[str, pa.DataType] | None:
        """Return a dict from column to type, from the table or, if missing, from a checkpoint."""
        if found := self._leaves():
            return {leaf.name: leaf.type for leaf in found if not leaf.exploded}
        if not self.trained_kinds:
            return None
        return {
            name: type_of_sort(
                self.trained_kinds.get(name)
                or ("times" if use.by or "time" in use.roles else "numbers")
            )
            for name, use in self.options.columns.items()
            if use.roles != ("unused",) and name not in self.options.explode
        }

    def _leaves(self) -> list[Leaf]:
        """Return the columns and struct fields of the table, or [] if the table is missing."""
        try:
            return leaves(self._place.source.schema, self.options.explode)
        except RecdError:
            return []

    def kinds(self) -> dict[str, str]:
        """Return a dict from feature to type category (``sort_of``); {} without the table."""
        compared = [leaf for leaf in self._leaves() if self._is_compared(leaf.name)]
        found = {leaf.name: sort_of(leaf.type) for leaf in compared}
        if found and self._stored is not None:
            found |= {name: item.kind for name, item in self._stored.items().items()}
        return found

    def _is_compared(self, leaf: str) -> bool:
        use = self.options.columns.get(leaf)
        # A part of a time is the same number for every time format.
        return use is not None and use.feature is not None and use.by is None

    def _check_kinds(self, mine: Source, known: Mapping[str, str], trained: object) -> None:
        """Raise an error if a column's category differs from training, as no id would match."""
        for leaf in leaves(mine.schema, self.options.explode):
            there = known.get(leaf.name, "")
            here, wanted = (sort.removeprefix("lists of ") for sort in (sort_of(leaf.type), there))
            compared = self._is_compared(leaf.name) and not holds_nothing(leaf.type)
            if there and compared and here != wanted:
                stored = wanted
                if there != wanted and not is_list(plain(leaf.type)):
                    stored = f"{there}, in Parquet or JSON lines"
                problem = (
                    f"column {leaf.name!r} contains {here}, but {there} in the training table "
                    f"{trained}. Store the column as {stored}."
                )
                if (here, there) == ("text", "numbers") and (first := _first_text(mine, leaf)):
                    row, text = first
                    problem += f" The first text is {text[:60]!r} in row {row} (from 0)."
                raise PlanError(mine.location, [(("columns", leaf.name), problem)])

    @cached_property
    def _tables(self) -> dict[Split, parquet.ParquetTable]:
        found: dict[Split, parquet.ParquetTable] = {}
        for split in self.splits():
            apart = split == "test" and self.options.test_path is not None
            folder = self._imported(split).folder / ("train" if apart else split)
            found[split] = parquet.ParquetTable(folder)
        return found

    def _table_of(self, split: Split) -> parquet.ParquetTable:
        if split not in self.splits():
            raise DataError(
                f"dataset 'tables.table' has no {split} split. Set option 'split"
                + ("' or 'test_path'." if split == "test" else ".validation'.")
            )
        return self._tables[split]

    def _imported(self, split: Split) -> Imported:
        apart = split == "test" and self.options.test_path is not None
        return self._test if apart else self._train

    def _named(self, split: Split, rows: Iterator[Rows]) -> Generator[Rows, None, None]:
        named = SourceRows(self._imported(split).note.files, bool(self.options.explode))
        for each in rows:
            origins = tuple(replace(origin, named=named) for origin in each.origins)
            yield replace(each, origins=origins)

    def _columns(self, *keys: str) -> list[str]:
        schema = self.schema()
        return list(dict.fromkeys([*schema.sparse, *schema.dense, *schema.labels, *keys]))

    @cached_property
    def _stored(self) -> StoredHistories | None:
        if not self.options.stored_histories:
            return None
        from recd_plugin_tables.histories.windows import StoredHistories

        return StoredHistories(self.options)

    def _read(
        self, split: Split, pieces: Iterator[readers.Piece], columns: Sequence[str]
    ) -> Generator[Rows, None, None]:
        table, stored = self._table_of(split), self._stored
        late = self.options.stored_histories
        keys = () if stored is None else stored.keys
        names = dict.fromkeys([*(name for name in columns if name not in late), *keys])
        schema = pa.schema([table.schema.field(name) for name in names])
        rows = self._named(split, table.read(pieces, schema))
        return rows if stored is None else stored.add(rows, columns)

    def _reader(
        self, columns: Sequence[str], rank: int, world_size: int, batch_size: int, split: Split
    ) -> Reader:
        table = self._table_of(split)
        options = self.options
        data = {"split": split, "files": readers.digest(table.identity())}
        if self._stored is not None:
            data["histories"] = readers.digest(self._stored.contents())
        return readers.PlannedReader(
            readers.ReadPlan(
                table.units,
                batch_size,
                shuffle=options.shuffle and split == "train",
                seed=options.seed,
            ),
            lambda pieces: self._read(split, pieces, columns),
            data=data,
            what=f"{options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )


def _first_text(source: Source, leaf: Leaf) -> tuple[int, str] | None:
    """Return row and value of the first text in a column that is not a number, if there is one."""
    if leaf.exploded or not is_text(leaf.type):
        return None
    start = 0
    for rows in source.batches([leaf.path[0]]):
        values = leaf_array(rows[leaf.path[0]], leaf)
        for row, value in enumerate(values.to_pylist(), start):
            if value and not is_number(value):
                return row, value
        start += len(values)
    return None
