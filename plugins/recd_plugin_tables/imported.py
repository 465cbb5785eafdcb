"""The import of a table: found where it was made before, made where it was not."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from recd_plugin_tables.columns import Columns, feature_name
from recd_plugin_tables.imports.converter import OnNan
from recd_plugin_tables.imports.note import ImportNote
from recd_plugin_tables.imports.spill import HistoryOptions, SplitOptions
from recd_plugin_tables.kinds import is_text
from recd_plugin_tables.plan import OF_IMPORT, ColumnPlan, Others, key_name, plan_columns
from recd_plugin_tables.sources import (
    AsTrained,
    Source,
    SourceOptions,
    TrainedColumns,
    open_source,
)
from recd_plugins.api import PluginOptions, digest

#: Of what an import is made, besides the table and the options: another number makes it anew.
VERSION = 7

_WAITS = "another process imports it, which this one waits for"


class ImportOptions(PluginOptions):
    """What an import is made by, besides the table."""

    columns: Columns = Field(
        description="What each column is used for: id, ids, number, numbers, session, time, "
        "request, key, label or unused; fields of structs by their path, as user.age."
    )
    others: Others = Field(
        default="error", description="What of columns that columns does not name: error or unused."
    )
    explode: tuple[str, ...] = Field(
        default=(),
        description="Columns of lists, parallel ones, of which each element is a row: candidates.",
    )
    implicit: bool = Field(
        default=False, description="Every row is a positive, label 1: a log without a label."
    )
    histories: dict[str, HistoryOptions] = Field(
        default={},
        description="Features to build of a log without a label, by name: the ids that a column "
        "had in earlier rows of the session.",
    )
    on_nan: OnNan = Field(
        default="error",
        description="What becomes of numbers that are missing or infinite: error, drop the row, or "
        "zero. missing of a column goes before it.",
    )
    order: Literal["session", "stored"] = Field(
        default="session",
        description="session: rows of a session together, by time, so that what they share is "
        "stored once; sessions in the order of a hash. stored: as the table has them.",
    )
    split: SplitOptions | None = Field(
        default=None, description="What is kept for the test split; null keeps none."
    )
    source: SourceOptions = Field(default=SourceOptions(), description="How the table is opened.")
    cache: Path = Field(
        default=Path(".recd/tables"),
        description="Folder for imports; one is made anew where the table or these options change.",
    )

    @model_validator(mode="after")
    def _split_by_what_there_is(self) -> Self:
        roles = {role for use in self.columns.values() for role in use.roles}
        grouped = bool(roles & {"session", "request"} or self.explode)
        by = self.split.by if self.split else None
        if (by == "time" and "time" not in roles) or (by == "session" and not grouped):
            raise ValueError(
                f"split by: {by} needs a column that is {by}, and columns has none; mark one, or "
                "choose by: row"
            )
        return self

    @model_validator(mode="after")
    def _histories_suit(self) -> Self:
        roles = {role for use in self.columns.values() for role in use.roles}
        taken = {"label", *OF_IMPORT}
        for column, use in self.columns.items():
            taken |= {use.name or feature_name(column), key_name(column, use)}
        for name, history in self.histories.items():
            where = f"histories.{name}"
            if not re.fullmatch(r"\w+", name) or name in taken:
                raise ValueError(
                    f"{where}: choose a name of letters, digits and _ that no column has"
                )
            items = self.columns.get(history.of)
            if items is None or items.feature != "id":
                raise ValueError(
                    f"{where}.of: {history.of!r} is not a column used as id; name one that is"
                )
            if not self.implicit:
                raise ValueError(f"{where} works only for logs without a label; set implicit: true")
            if not roles & {"session", "request"}:
                raise ValueError(f"{where} needs a session or request column; mark one")
            if self.split is not None and self.split.by == "row":
                raise ValueError(
                    f"{where}: split by: row puts test rows into training histories; choose by: "
                    "time or session"
                )
        return self


@dataclass(frozen=True)
class Imported:
    """An import that is there.

    Attributes:
        location: the table, as messages name it.
        folder: where its splits are, ``train`` and maybe ``test``.
        note: what became of the rows.
        new: whether it was made just now.
    """

    location: str
    folder: Path
    note: ImportNote
    new: bool = field(compare=False)

    def say(self) -> None:
        """Tell what became of the rows, where it was made just now."""
        from click import echo

        if self.new:
            echo("\n".join(self.note.in_words(self.location)), err=True)


@dataclass(frozen=True)
class ImportPlace:
    """Where the import of a table is, or would be.

    Args:
        path: of the table.
        options: what it is made by.
        label: name of the column of the label.
        widths: of features that are lists of numbers, where another table says it.
        scoring: every row is kept as stored, and the label is not looked at.
        trained: columns of the table that is trained on, where this is another and they are known.
    """

    path: Path | str
    options: ImportOptions
    label: str
    widths: dict[str, int] | None = None
    scoring: bool = False
    trained: TrainedColumns | None = None

    @cached_property
    def source(self) -> Source:
        """The table."""
        source = open_source(
            self.path, options=self.options.source, of_another=self.scoring, texts=self._texts
        )
        return source if self.trained is None else AsTrained(source, self.trained)

    @property
    def _texts(self) -> tuple[str, ...]:
        types = {} if self.trained is None else self.trained.types
        return tuple(name for name, kind in types.items() if is_text(kind))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the import is made of; JSON values."""
        location = self.source.location
        options = set(ImportOptions.model_fields) - {"cache"}
        return {
            "location": location if "://" in location else str(Path(self.path).resolve()),
            "source": self.source.identity(),
            "options": self.options.model_dump(mode="json", by_alias=True, include=options),
            "widths": self.widths,
            "scoring": self.scoring,
            "texts": self._texts,
            "version": VERSION,
        }

    @cached_property
    def folder(self) -> Path:
        """The folder of the import."""
        name = Path(str(self.path).rstrip("/")).name.partition(".")[0]
        stem = re.sub(r"\W+", "_", name) or "table"
        return self.options.cache / f"{stem}-{digest(self.identity)}"

    def find(self) -> Imported | None:
        """The import, None where it is not there."""
        note = ImportNote.read(self.folder)
        return None if note is None else Imported(self.source.location, self.folder, note, False)

    def plan(self) -> ColumnPlan:
        """Which column is what, by the table's schema."""
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
            folder_keys=self.trained.folder_keys if self.trained is not None else (),
        )

    def make(self) -> Imported:
        """The import, made where it is not there, with a bar on stderr."""
        if (found := self.find()) is not None:
            return found
        # What writes needs numba.
        from recd_plugin_tables.imports.make import Importer
        from recd_plugins.api import progress_bars

        source, options, plan = self.source, self.options, self.plan()
        grouped = plan.session or plan.request or plan.explode
        importer = Importer(
            source,
            plan,
            label=self.label,
            on_nan=options.on_nan,
            split=options.split,
            clustered=options.order == "session" and bool(grouped),
            widths=self.widths,
            scoring=self.scoring,
            histories=options.histories,
        )
        with progress_bars() as add_bar:
            bar = add_bar(f"importing {source.location}", source.num_rows)
            note = importer.make(
                self.folder,
                self.identity,
                bar,
                lambda: print(f"{source.location}: {_WAITS}", file=sys.stderr),
            )
        return Imported(source.location, self.folder, note, new=True)
