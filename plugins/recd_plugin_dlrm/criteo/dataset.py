"""Dataset ``dlrm.criteo``."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import Field, NonNegativeInt, PositiveInt

from recd_plugin_dlrm.criteo.days import (
    DENSE,
    LABEL,
    SPARSE,
    Day,
    DayFiles,
    NpyDay,
    ParquetDay,
    Stretch,
    find_days,
)
from recd_plugin_dlrm.criteo.dictionary import (
    Buckets,
    CountedRows,
    IdCoder,
    dictionary_of,
    encode,
    raw_ids,
)
from recd_plugin_dlrm.criteo.tsv import BadLines, TsvDay, index_of
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Piece,
    PlannedReader,
    PluginOptions,
    Reader,
    ReadPlan,
    Rows,
    Split,
    Unit,
    digest,
)

#: Folder beside the data for indexes and dictionaries, if option ``cache`` names no other.
CACHE = ".recd-criteo"


class Criteo(Dataset):
    """Criteo's click logs, Kaggle's or the Terabyte: TSV, also compressed, Parquet or npy."""

    name = "dlrm.criteo"
    free_options = frozenset({"path", "cache", "prefetch"})
    row_options = frozenset({"shuffle", "seed"})

    class Options(PluginOptions):
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

    options: Options

    def prepare(self) -> None:
        """Index TSV files and make the dictionary, unless they are in the cache."""
        days = self._days
        if self._bad_lines.count:
            click.echo(
                f"{self.options.path}: skipped {self._bad_lines.count} bad lines, for example "
                f"{self._bad_lines.shown[0]}",
                err=True,
            )
        if self.options.shuffle and not all(day.can_jump for day in days):
            raise DataError(
                f"{self.options.path}: compressed files are read from front to back and cannot be "
                "shuffled; convert them first: recd criteo convert"
            )
        _ = self._coder

    def identity(self) -> dict[str, Any]:
        return {"days": {day.name: day.contents() for day in self._days}}

    def schema(self) -> FeatureSchema:
        return FeatureSchema(SPARSE, DENSE, LABEL)

    def splits(self) -> tuple[Split, ...]:
        return ("train",) if self.options.evaluate == "nothing" else ("train", "test")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        options = self.options
        if split not in self.splits():
            raise DataError("there is no test split: option evaluate of dlrm.criteo is nothing")
        units = tuple(
            Unit(number, group, stretch.first_row, stretch.num_rows)
            for number, stretches in self._rows_of(split)
            for group, stretch in enumerate(stretches)
        )
        shuffle = options.shuffle and split == "train"
        encoding = {"categorical", "dense", "buckets", "threshold", "max_ids"}
        return PlannedReader(
            ReadPlan(units, batch_size, shuffle=shuffle, seed=options.seed),
            self._read,
            data={
                "split": split,
                "files": digest([day.identity() for day in self._days]),
                "parts": [options.evaluate, options.parts],
                "encoding": digest(options.model_dump_json(include=encoding)),
            },
            what=f"{options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        for number, run in groupby(pieces, key=lambda piece: piece.unit.file):
            stretches = (
                Stretch(piece.unit.first_row + piece.skip, piece.num_rows) for piece in run
            )
            for rows, origins in self._days[number].read(stretches):
                yield Rows(encode(rows, origins[0].path, self._coder, self.options.dense), origins)

    def _rows_of(self, split: Split) -> list[tuple[int, list[Stretch]]]:
        """Number of a file, and its rows in the split, for each day.

        The first half of the last day, the longer one if they differ, is for validation, the
        second for testing, as in torchrec.datasets.criteo. The days of a single file are equal
        parts, of which the first have a row more if they do not come out even, as in DLRM.
        """
        sizes = [day.num_rows for day in self._days]
        days = [(number, 0, size) for number, size in enumerate(sizes)]
        if len(days) == 1:
            parts = self.options.parts
            size, more = divmod(sizes[0], parts)
            edges = [part * size + min(part, more) for part in range(parts + 1)]
            days = [(0, first, stop) for first, stop in pairwise(edges)]
        number, first, stop = days[-1]
        middle = stop - (stop - first) // 2
        held_out: Mapping[str, tuple[int, int]] = {
            "test": (middle, stop),
            "validation": (first, middle),
            "last_day": (first, stop),
        }
        if split == "test":
            days = [(number, *held_out[self.options.evaluate])]
        elif self.options.evaluate != "nothing":
            del days[-1]
        return [(number, self._days[number].stretches(*rows)) for number, *rows in days]

    @property
    def _cache(self) -> Path:
        path = self.options.path
        return self.options.cache or (path if path.is_dir() else path.parent) / CACHE

    @cached_property
    def _bad_lines(self) -> BadLines:
        return BadLines(self.options.max_bad_lines if self.options.bad_lines == "skip" else 0)

    @cached_property
    def _days(self) -> list[Day]:
        return [self._open(files) for files in find_days(self.options.path)]

    def _open(self, files: DayFiles) -> Day:
        if files.format == "Parquet":
            return ParquetDay(files.name, files.path)
        if files.format == "npy":
            return NpyDay(files.name, files.path, self.options.npy_sparse)
        index = index_of(files.path, self._cache, self._bad_lines)
        return TsvDay(files.name, files.path, index)

    @cached_property
    def _coder(self) -> IdCoder:
        options = self.options
        if options.categorical == "raw":
            return raw_ids
        if options.categorical == "hashed":
            return Buckets(options.buckets)
        sections = [
            CountedRows(self._days[number], stretches)
            for number, stretches in self._rows_of("train")
            if stretches
        ]
        return dictionary_of(self._cache, sections, options.threshold, options.max_ids)
