"""Options of dataset ``dlrm.criteo``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from recd_plugin_dlrm.criteo.days import DENSE, LABEL, SPARSE
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    PluginOptions,
    Reader,
    Rows,
    Split,
)

if TYPE_CHECKING:
    from recd_plugin_dlrm.criteo.days import Day
    from recd_plugin_dlrm.criteo.dictionary import IdCoder
    from recd_plugin_dlrm.criteo.tables import CriteoTables, Start
    from recd_plugins.api import Piece, Unit


class CriteoOptions(PluginOptions):
    """What ``dlrm.criteo`` reads, and how."""

    path: Path = Field(
        description="The file train.txt, or a folder with day_0, day_1... or train: TSV, "
        "plain, .gz or .zst, .parquet, or npy in threes."
    )
    evaluate: Literal["test", "validation", "last_day", "nothing"] = Field(
        default="test",
        description="What the test split is: the second half of the last day, its first half, "
        "the whole day, or nothing; then all days are trained on.",
    )
    parts: int = Field(
        default=7, ge=2, description="Days that one file holds, which count as equally long."
    )
    dense: Literal["log1p", "stored"] | None = Field(
        default=None,
        description="log1p makes log(x + 1) of numbers, and 0 of negative ones; stored leaves "
        "them; null is log1p for whole numbers and stored for floats.",
    )
    categorical: Literal["hashed", "dictionary", "raw"] = Field(
        default="hashed",
        description="How ids become rows of tables: modulo, by a dictionary of the training "
        "days, or not at all.",
    )
    buckets: PositiveInt | dict[str, PositiveInt] = Field(
        default=100_000, description="Of hashed: rows of every table, or by name or pattern."
    )
    threshold: PositiveInt = Field(
        default=3, description="Of dictionary: ids that occur less often share row 1."
    )
    max_ids: int | None = Field(
        default=None, ge=2, description="Of dictionary: rows of a table at most."
    )
    bad_lines: Literal["error", "skip"] = Field(
        default="error", description="What a line of TSV is that is none of Criteo's."
    )
    max_bad_lines: NonNegativeInt = Field(
        default=100, description="Of skip: one bad line more, in all files, is an error."
    )
    cache: Path | None = Field(
        default=None,
        description="Folder for row counts and dictionaries; null takes .recd-criteo beside "
        "the data.",
    )
    npy_sparse: str = Field(
        default="sparse",
        pattern=r"^sparse\w*$",
        description="The end of the names of npy files with ids.",
    )
    shuffle: bool = Field(
        default=False, description="Read units of rows in another order in each epoch."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    prefetch: NonNegativeInt = Field(
        default=4, description="Batches read ahead in a thread; 0 reads in the trainer's own."
    )


# Passes over less than this are over before a progress bar could tell anything.
_ROWS_WITH_PROGRESS = 2_000_000


class Criteo(Dataset):
    """Criteo's click logs, Kaggle's or the Terabyte: TSV, also compressed, Parquet or npy."""

    name = "dlrm.criteo"
    free_options = frozenset({"path", "cache", "prefetch"})
    row_options = frozenset({"shuffle", "seed"})

    class Options(CriteoOptions):
        pass

    options: Options

    def prepare(self) -> None:
        """Count the rows of TSV files and make the dictionary, where that was not done before."""
        tables = self._tables
        if tables.num_bad_lines:
            from recd_plugins.api import error_console

            error_console().print(
                f"{self.options.path}: skipped {tables.num_bad_lines} bad lines, for example "
                f"{tables.bad_lines[0]}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
        _ = self._coder

    def identity(self) -> dict[str, Any]:
        return {"days": {day.name: day.contents() for day in self._tables.days}}

    def schema(self) -> FeatureSchema:
        return FeatureSchema(SPARSE, DENSE, LABEL)

    def splits(self) -> tuple[Split, ...]:
        return ("train",) if self.options.evaluate == "nothing" else ("train", "test")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        from recd_plugins.api import PlannedReader, ReadPlan, digest

        options = self.options
        if split not in self.splits():
            raise DataError("there is no test split: option evaluate of dlrm.criteo is nothing")
        tables = self._tables
        shuffle = options.shuffle and split == "train"
        coder = self._coder
        encoding = {"categorical", "dense", "buckets", "threshold", "max_ids"}
        return PlannedReader(
            ReadPlan(self._units(split), batch_size, shuffle=shuffle, seed=options.seed),
            lambda pieces: self._read(tables.days, coder, pieces),
            data={
                "split": split,
                "files": digest([day.identity() for day in tables.days]),
                "parts": [options.evaluate, options.parts],
                "encoding": digest(options.model_dump_json(include=encoding)),
            },
            what=f"{options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    def _units(self, split: Split) -> tuple[Unit, ...]:
        from recd_plugins.api import Unit

        return tuple(
            Unit(number, group, stretch.first_row, stretch.num_rows)
            for number, stretches in self._tables.split(split)
            for group, stretch in enumerate(stretches)
        )

    def _read(
        self, days: list[Day], coder: IdCoder, pieces: Iterator[Piece]
    ) -> Generator[Rows, None, None]:
        from recd_plugin_dlrm.criteo.days import Stretch
        from recd_plugin_dlrm.criteo.dictionary import encode

        for number, run in groupby(pieces, key=lambda piece: piece.unit.file):
            stretches = (
                Stretch(piece.unit.first_row + piece.skip, piece.num_rows) for piece in run
            )
            for rows, origins in days[number].read(stretches):
                yield Rows(encode(rows, coder, self.options.dense), origins)

    @property
    def _cache(self) -> Path:
        from recd_plugin_dlrm.criteo.tables import CACHE

        path = self.options.path
        return self.options.cache or (path if path.is_dir() else path.parent) / CACHE

    @cached_property
    def _tables(self) -> CriteoTables:
        from recd_plugin_dlrm.criteo.tables import CriteoTables

        with _progress() as start:
            tables = CriteoTables(self.options, self._cache, start)
        if self.options.shuffle and not all(day.can_jump for day in tables.days):
            raise DataError(
                f"{self.options.path}: compressed files are read from front to back and cannot be "
                "shuffled; convert them first: recd criteo convert"
            )
        return tables

    @cached_property
    def _coder(self) -> IdCoder:
        from recd_plugin_dlrm.criteo.dictionary import Buckets, raw_ids

        if self.options.categorical == "raw":
            return raw_ids
        if self.options.categorical == "hashed":
            return Buckets(self.options.buckets)
        return self._dictionary()

    def _dictionary(self) -> IdCoder:
        from recd_plugin_dlrm.criteo.dictionary import DictionaryFile

        options = self.options
        sections = self._tables.sections()
        file = DictionaryFile(self._cache, sections, options.threshold, options.max_ids)
        if (dictionary := file.load()) is not None:
            return dictionary
        with _progress() as start:
            rows = sum(part.num_rows for section in sections for part in section.stretches)
            return file.make(start("counting ids", rows))


@contextmanager
def _progress() -> Iterator[Start]:
    """Progress bars of what takes a while; what is soon done shows none."""
    from recd_plugins.api import AddBar, progress_bars

    with ExitStack() as stack:
        add_bar: AddBar | None = None

        def start(name: str, num_rows: int | None) -> Callable[[int], None]:
            done = 0
            advance: Callable[[int], None] | None = None

            def progress(rows: int) -> None:
                nonlocal add_bar, advance, done
                done += rows
                if advance is not None:
                    advance(rows)
                elif done >= _ROWS_WITH_PROGRESS:
                    add_bar = add_bar or stack.enter_context(progress_bars())
                    advance = add_bar(name, num_rows)
                    advance(done)

            return progress

        yield start
