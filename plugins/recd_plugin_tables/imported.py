"""The import of a table: its options, its folder and the metadata file of the folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from recd_plugin_tables.converter import OnNan
from recd_plugin_tables.histories.options import HistoryOptions, stored_problems
from recd_plugin_tables.kinds import Columns, is_text
from recd_plugin_tables.labels import Labels, label_problems, with_one_label
from recd_plugin_tables.plan import CANDIDATE, ROW, ColumnPlan, Others, plan_columns
from recd_plugin_tables.sources import Source, SourceOptions, open_source
from recd_plugin_tables.spill import SplitOptions
from recd_plugins.api import PluginOptions, Split, file_utils, readers, text_utils

# An import of another version is rebuilt.
_VERSION = 10
_NOTE = "import.json"


class ImportOptions(PluginOptions):
    """Options that, together with the content of a table, determine its import."""

    columns: Columns = Field(
        description="Role of each column. Name struct fields by path, such as user.age."
    )
    others: Others = Field(
        default="error",
        description="What to do with columns that are not listed in columns: error or unused.",
    )
    label: Labels = Field(
        default=(),
        description="Labels of multi-task training. Each is a column name, or a mapping with the "
        "keys below. A single column name has the same effect as role `label` in `columns`.",
    )
    explode: tuple[str, ...] = Field(
        default=(),
        description="List columns with one element per candidate, all of equal length. Each "
        "element becomes a row.",
    )
    implicit: bool = Field(
        default=False, description="For a log without a label: every row is positive (label 1)."
    )
    histories: dict[str, HistoryOptions] = Field(
        default={},
        description="History features by name. Option `of` reads earlier rows of the session, and "
        "needs `implicit`. Option `store` reads earlier events of the user.",
    )
    on_nan: OnNan = Field(
        default="error",
        description="How to handle missing or infinite numbers: error, drop the row, or "
        "zero. A column's own missing option takes precedence.",
    )
    order: Literal["session", "stored"] = Field(
        default="session",
        description="session: group the rows of each session, sorted by time, so that "
        "shared values are stored once. Sessions are in hash order. stored: "
        "keep the order of the table.",
    )
    split: SplitOptions | None = Field(
        default=None,
        description="How to choose the validation and test splits; null means neither.",
    )
    source: SourceOptions = Field(
        default=SourceOptions(), description="Options for opening the table."
    )
    cache: Path = Field(
        default=Path(".recd/tables"),
        description="Folder for imports. An import is rebuilt if the table or these "
        "options change.",
    )

    @property
    def split_names(self) -> tuple[Split, ...]:
        """Names of the splits of the import."""
        return ("train",) if self.split is None else self.split.names

    @property
    def built_histories(self) -> dict[str, HistoryOptions]:
        """Histories that the import builds from the table."""
        return {name: each for name, each in self.histories.items() if each.store is None}

    @property
    def stored_histories(self) -> dict[str, HistoryOptions]:
        """Histories that the dataset reads from stores of events."""
        return {name: each for name, each in self.histories.items() if each.store is not None}

    @model_validator(mode="before")
    @classmethod
    def _one_label(cls, given: Any) -> Any:
        return with_one_label(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if problems := ". ".join(label_problems(self.label, self.columns, implicit=self.implicit)):
            raise ValueError(problems)
        roles = {role for use in self.columns.values() for role in use.roles}
        grouped = bool(roles & {"session", "request"})
        by = self.split.by if self.split else None
        if (by == "time" and "time" not in roles) or (
            by == "session" and not (grouped or self.explode)
        ):
            raise ValueError(
                f"split: {{by: {by}}} needs a column with role {by!r}, but option 'columns' has "
                "none. Set this role for a column, or set by: row"
            )
        if problems := ". ".join(stored_problems(self.stored_histories, self.columns)):
            raise ValueError(problems)
        for name, history in self.built_histories.items():
            where = f"histories.{name}"
            items = self.columns.get(str(history.of))
            if items is None or items.feature != "id":
                raise ValueError(
                    f"{where}.of: {history.of!r} is not a column with role 'id'. Use a column with "
                    "role 'id'"
                )
            if not self.implicit:
                raise ValueError(
                    f"{where}: histories need a log without a label. Set implicit: true"
                )
            if not grouped:
                raise ValueError(
                    f"{where}: histories need a session or request column. Set one of "
                    "these roles for a column"
                )
            if by == "row":
                raise ValueError(
                    f"{where}: with split: {{by: row}}, training histories would contain test "
                    "rows. Set by: time or by: session"
                )
        return self


@dataclass(frozen=True)
class ImportNote:
    """Metadata file of an import.

    Attributes:
        rows: rows of the table.
        train, validation, test: rows of the splits.
        positives, train_positives: rows with label 1, in all splits and in training.
        scoring: whether the import is for scoring, so that it keeps every row.
        without_candidates: rows of the table whose exploded lists are empty.
        dropped: number of rows dropped for a missing value, keyed by column.
        filled: number of missing or infinite values that were replaced, keyed by column.
        empty: number of missing lists and ids that became empty lists, keyed by column.
        without_ids: number of rows whose list of ids is missing or empty, keyed by column.
        widths: list length of each ``numbers`` feature.
        files: files of the table in order, and the number of rows of each.
        unlabelled: number of rows without a label, keyed by label; only of several labels.
        task_means: means of the training labels for ``Dataset.task_means``.
        times: first and last time of each split in microseconds since 1970; empty without a time
            column.
    """

    rows: int
    train: int
    validation: int
    test: int
    positives: int
    train_positives: int
    scoring: bool
    without_candidates: int
    dropped: Mapping[str, int]
    filled: Mapping[str, int]
    empty: Mapping[str, int]
    without_ids: Mapping[str, int]
    widths: Mapping[str, int]
    files: Sequence[tuple[str, int]]
    times: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unlabelled: Mapping[str, int] = field(default_factory=dict)
    task_means: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Number of rows in all splits."""
        return self.train + self.validation + self.test

    def write(self, folder: Path) -> None:
        """Write the metadata file into the folder of the import."""
        file_utils.write_note(folder / _NOTE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> ImportNote | None:
        """Read the metadata of an import, or return None if the import is missing or incomplete."""
        found = file_utils.read_note(folder / _NOTE)
        return cls(**found) if found is not None else None

    def time_leak(self, test_times: tuple[int, int] | None) -> list[str]:
        """Return the lines of a warning if training rows are later than test rows, or []."""
        train_times = self.times.get("train")
        if train_times is None or test_times is None or train_times[1] <= test_times[0]:
            return []
        return [
            "  Some training rows are later than test rows, so test metrics may be too good. Set "
            "split: {by: time} to test on the latest rows."
        ]

    def lines(self, name: str, *, is_test: bool = False) -> list[str]:
        """Return the lines that summarize a new import. ``is_test``: it is a table for testing."""
        purpose = "to score" if self.scoring else "for testing" if is_test else "for training"
        others = (("for validation", self.validation), ("for testing", self.test))
        of_splits = ((purpose, self.train), *others)
        kept = ", ".join(f"{rows:,} {name}" for name, rows in of_splits if rows)
        became = ":" if self.kept == self.rows else " became"
        what = "have a missing value" if self.scoring else "were dropped for a missing value"
        lines = [f"{name}: {self.rows:,} rows{became} {kept}"]
        if self.dropped:
            lines.append(f"  Rows that {what}: {_counts(self.dropped)}")
        if self.without_candidates:
            lines.append(
                f"  {self.without_candidates:,} rows were dropped because their exploded lists are "
                "empty"
            )
        if self.without_ids:
            lines.append(f"  Rows with no ids: {_counts(self.without_ids)}")
        if self.filled:
            lines.append(f"  Replaced missing or infinite values: {_counts(self.filled)}")
        if self.unlabelled:
            lines.append(
                f"  Rows without a label, left out of its loss and metrics: "
                f"{_counts(self.unlabelled)}"
            )
        return lines + self.time_leak(self.times.get("test"))


def _as_json(histories: Mapping[str, HistoryOptions]) -> dict[str, Any]:
    return {name: each.model_dump(mode="json") for name, each in histories.items()}


def _counts(by_column: Mapping[str, int]) -> str:
    return text_utils.shortened(
        [f"{count:,} in {name!r}" for name, count in by_column.items()], str
    )


@dataclass(frozen=True)
class SourceRows:
    """Finds the source file and row of a row of an import, for error messages."""

    files: Sequence[tuple[str, int]]
    exploded: bool

    def __call__(self, path: str, row: int) -> str:
        """Describe the source file, row (from 0) and, if lists were exploded, the candidate."""
        table = pq.ParquetFile(pa.OSFile(path)).read([ROW, CANDIDATE]).slice(row, 1)
        ((in_file, number),) = zip(*table.to_pydict().values(), strict=True)
        candidate = f", candidate {number}" if self.exploded else ""
        for file, num_rows in self.files:
            if in_file < num_rows:
                return f"{file}: row {in_file} (from 0){candidate}"
            in_file -= num_rows
        raise IndexError(row)


@dataclass(frozen=True)
class Imported:
    """An imported table. ``folder`` has its splits; ``new`` is True if it was just built."""

    folder: Path
    note: ImportNote
    new: bool = field(compare=False)


@dataclass(frozen=True)
class ImportPlace:
    """Location of the import of a table, which may not exist yet.

    Args:
        path: path or URL of the table.
        options: options of the import.
        labels: names of the label columns.
        widths: known list lengths of ``numbers`` features.
        scoring: whether to keep every row in stored order and ignore labels.
        trained: types of the training table's columns, for columns with only nulls here; or None.
    """

    path: Path | str
    options: ImportOptions
    labels: tuple[str, ...]
    widths: dict[str, int] | None = None
    scoring: bool = False
    trained: Mapping[str, pa.DataType] | None = None

    @cached_property
    def source(self) -> Source:
        """The source table, opened."""
        return open_source(
            self.path, self.options.source, of_another=self.scoring, texts=self._texts
        )

    @property
    def _texts(self) -> list[str]:
        return [name for name, kind in (self.trained or {}).items() if is_text(kind)]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return JSON values that determine the content of the import."""
        location = self.source.location
        options = set(ImportOptions.model_fields) - {"cache"}
        if not self.options.label:
            options.remove("label")
        return {
            "location": location if "://" in location else str(Path(self.path).resolve()),
            "source": self.source.identity(),
            "options": self.options.model_dump(mode="json", by_alias=True, include=options)
            | {"histories": _as_json(self.options.built_histories)},
            "widths": self.widths,
            "scoring": self.scoring,
            "texts": self._texts,
            "version": _VERSION,
        }

    @cached_property
    def folder(self) -> Path:
        """The folder of the import."""
        name = Path(str(self.path).rstrip("/")).name.partition(".")[0]
        stem = re.sub(r"\W+", "_", name) or "table"
        return self.options.cache / f"{stem}-{readers.digest(self.identity)}"

    def find(self) -> Imported | None:
        """Return the import, or None if it was not built yet."""
        note = ImportNote.read(self.folder)
        return None if note is None else Imported(self.folder, note, False)

    def plan(self) -> ColumnPlan:
        """Assign a role to each column of the table."""
        options = self.options
        return plan_columns(
            self.source.location,
            self.source.schema,
            options.columns,
            others="unused" if self.scoring else options.others,
            explode=options.explode,
            implicit=options.implicit,
            labelled=not self.scoring,
            needed=("session", "request", "time") if options.histories else (),
            trained=self.trained or {},
            labels=self.options.label,
        )
