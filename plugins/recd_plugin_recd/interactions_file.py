"""Reads interactions (user, item, value or label, time) from CSV-like files."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from recd_plugins.api import DataError

SEPARATORS = {".inter": "\t", ".tsv": "\t", ".csv": ",", ".dat": "::", ".data": "\t"}
#: Files of MovieLens that begin with data.
WITHOUT_HEADER = (".dat", ".data")
#: Columns of a file without a header, in MovieLens' order.
DEFAULT_NAMES = ["user_id", "item_id", "rating", "timestamp"]
#: Kinds of ids.
NUMBERS, TEXT = "numbers", "text"

# Arrow takes one byte; no text has this one.
_UNIT_SEPARATOR = "\x1f"
_RECBOLE_TYPE = re.compile(r":(token|float)(_seq)?$")
# Without zeros in front: 7 and 07 are two ids.
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Format:
    """How a file is laid out.

    Attributes:
        separator: between columns, of any length.
        names: of all columns.
        has_header: whether the first line is no data.
    """

    separator: str
    names: tuple[str, ...]
    has_header: bool

    @property
    def quotes(self) -> bool:
        return self.separator == ","


@dataclass(frozen=True)
class Columns:
    """Which columns are what; ``outcome`` is the value or the label."""

    user: str
    item: str
    outcome: str
    timestamp: str


@dataclass(frozen=True)
class Events:
    """Interactions in the order of the file, all ``[num_events]``.

    Whole numbers are ids as they are; where one of a column is none, all of it are 63 bits of a
    hash, the same in every file. NaN is an outcome that nobody knows yet. ``kinds`` says of the
    columns of ids which it was, ``numbers`` or ``text``.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    outcomes: NDArray[np.float64]
    times: NDArray[np.float64]
    kinds: Mapping[str, str] = field(default_factory=dict)


def detect_format(path: Path, separator: str | None, header: bool | Sequence[str] | None) -> Format:
    """Fill in by the file's suffix and first line what the options leave open."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file (looked for from {Path.cwd()}). MovieLens is at "
            "https://files.grouplens.org/datasets/movielens/"
        )
    if separator is None:
        separator = SEPARATORS.get(path.suffix.lower())
        if separator is None:
            raise DataError(
                f"{path}: set option separator; it is known for {', '.join(SEPARATORS)} only. Of "
                f"JSON lines, Parquet and others, recd init {path} my.yaml writes a registry"
            )
    if header is None:
        header = path.suffix.lower() not in WITHOUT_HEADER
    if header is True:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = lines.readline().rstrip("\r\n")
        names = next(csv.reader([first])) if separator == "," else first.split(separator)
        return Format(separator, tuple(_RECBOLE_TYPE.sub("", name.strip()) for name in names), True)
    return Format(separator, tuple(header or DEFAULT_NAMES), False)


@dataclass(frozen=True)
class Trained:
    """The file that a model was trained on which scores another one.

    Attributes:
        path: of it.
        kinds: of its columns of ids, as ``Events`` has them; empty where nobody knows.
    """

    path: Path
    kinds: Mapping[str, str]


def read_events(
    path: Path, layout: Format, columns: Columns, trained: Trained | None = None
) -> Events:
    """Read all events.

    Args:
        path: the file.
        layout: of it.
        columns: which are what.
        trained: of a file to score, whose ids are those of training, and whose outcomes may be
            empty.
    """
    wanted = {"user": columns.user, "item": columns.item, "timestamp": columns.timestamp}
    wanted["value or label"] = columns.outcome
    for option, name in wanted.items():
        if layout.names.count(name) != 1:
            advice = f"set option {option} to one of: {', '.join(layout.names)}"
            if trained is not None and name == columns.outcome:
                advice = "add it, empty in rows of which nobody knows the outcome yet"
            wrong = "no column" if name not in layout.names else "several columns are named"
            raise DataError(f"{path}: {wrong} {name}; {advice}")
    if len(set(wanted.values())) < len(wanted):
        raise DataError(f"{path}: user, item, timestamp and value or label need different columns")
    ids = (columns.user, columns.item)
    numbers = (columns.outcome, columns.timestamp)
    may_be_empty = () if trained is None else (columns.outcome,)
    known = {} if trained is None else trained.kinds
    try:
        table = _read(path, layout, ids, numbers)
        values = {name: _numbers(table, name, name in may_be_empty) for name in numbers}
        found = {name: _ids(table, name, known.get(name)) for name in ids}
    except (pa.ArrowInvalid, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    users, items = (each for each, _ in found.values())
    kinds = {name: kind for name, (_, kind) in found.items()}
    events = Events(users, items, values[columns.outcome], values[columns.timestamp], kinds)
    if trained is not None:
        for name, kind in kinds.items():
            if trained.kinds.get(name, kind) != kind:
                raise DataError(
                    f"{path}: column {name} has texts, and whole numbers in {trained.path}, which "
                    "is trained on: no id of the two would be the same"
                )
    if not len(events.users):
        raise DataError(f"{path}: no interactions in this file")
    return events


def _read(path: Path, layout: Format, ids: Sequence[str], numbers: Sequence[str]) -> pa.Table:
    types: Mapping[str, pa.DataType] = {
        **{name: pa.dictionary(pa.int32(), pa.string()) for name in ids},
        **{name: pa.float64() for name in numbers},
    }
    source: object = path
    delimiter = layout.separator
    if len(delimiter) > 1:
        content = path.read_bytes().replace(delimiter.encode(), _UNIT_SEPARATOR.encode())
        source, delimiter = pa.BufferReader(content), _UNIT_SEPARATOR
    return pa_csv.read_csv(
        source,
        read_options=pa_csv.ReadOptions(
            column_names=list(layout.names), skip_rows=int(layout.has_header), use_threads=False
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if layout.quotes else False,
            newlines_in_values=layout.quotes,
        ),
        convert_options=pa_csv.ConvertOptions(column_types=types, include_columns=[*ids, *numbers]),
    )


def _numbers(table: pa.Table, name: str, may_be_empty: bool) -> NDArray[np.float64]:
    values: NDArray[np.float64] = table[name].to_numpy()
    wrong = ~np.isfinite(values)
    if may_be_empty:
        wrong &= table[name].is_valid().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"column {name}, row {row} (from 0): a number is missing or not finite")
    return values


def _ids(table: pa.Table, name: str, known: str | None) -> tuple[NDArray[np.int64], str]:
    """Return the ids of a column and their kind, which is ``known`` for a file to score."""
    encoded = table[name].unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    names = encoded.dictionary.to_pylist()
    if encoded.null_count or not all(names):
        raise ValueError(f"column {name}: an id is empty")
    whole = known != TEXT and all(_WHOLE_NUMBER.fullmatch(name) for name in names)
    ids = [int(name) if whole else _hash(name) for name in names]
    return np.array(ids, np.int64)[np.asarray(encoded.indices)], NUMBERS if whole else TEXT


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
