"""Encodes raw rows as inputs of an exported model. ``recd export`` copies this file.

It needs only Python, and torch for ``Inputs.tensors``:

    encoder = Encoder("exported")
    model = torch.export.load("exported/model.pt2").module()
    scores = model(*encoder.encode(rows).tensors())

If there are user features, two programs compute the same scores:

    user, candidates = (torch.export.load(f"exported/{name}.pt2").module() for name in
                        ("user", "candidates"))
    vectors = user(*encoder.encode_user(request).tensors())  # once per request
    scores = candidates(vectors, *encoder.encode_candidates(rows).tensors())
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from numbers import Real
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Integers whose digits form a date, such as 20240501.
_FORMATS = {
    "YYYYMMDD": "%Y%m%d",
    "YYMMDDHH": "%y%m%d%H",
    "YYYYMMDDHH": "%Y%m%d%H",
    "YYYYMMDDHHMM": "%Y%m%d%H%M",
    "YYYYMMDDHHMMSS": "%Y%m%d%H%M%S",
}
_TIME = "a time, such as 2024-05-01 10:00:00"
_HOUR, _DAY = 3_600 * 10**6, 86_400 * 10**6  # microseconds
_LATEST_SECOND = 10**11
_ABSENT = object()
_REAL: tuple[Any, ...] = (Real, Decimal)  # Decimal is not a Real
_BRACKETS = re.compile(r"\s*(?:\[([^\[\]]*)\]|\{([^{}]*)\})\s*")


@dataclass(frozen=True)
class Inputs:
    """Inputs of an exported model as lists. ``signature.json`` describes them."""

    dense: list[list[float]]
    values: dict[str, list[int]]
    lengths: dict[str, list[int]]
    rows: dict[str, list[int]]

    def tensors(self) -> tuple[Any, ...]:
        """Return the inputs as tensors, in the order of the model's arguments."""
        import torch

        def ids(lists: dict[str, list[int]]) -> dict[str, torch.Tensor]:
            return {name: torch.tensor(each, dtype=torch.int64) for name, each in lists.items()}

        dense = torch.tensor(self.dense, dtype=torch.float64)
        return dense, ids(self.values), ids(self.lengths), ids(self.rows)


class Encoder:
    """Encodes raw rows, as the dataset of the training run does.

    Args:
        folder: output folder of ``recd export``.
        strict: reject every unknown column. By default, a column is rejected only if its name is
            similar to that of a missing column.
        row, shared: names of a row and of the shared columns in messages.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        strict: bool = False,
        row: str = "row",
        shared: str = "shared",
    ) -> None:
        text = Path(folder, "signature.json").read_text(encoding="utf-8")
        self._features: list[dict[str, Any]] = json.loads(text)["features"]
        self._user = [one for one in self._features if one.get("user")]
        self._candidates = [one for one in self._features if not one.get("user")]
        columns = [one["column"] for one in self._features]
        self._known = {*columns, *(name.partition(".")[0] for name in columns)}
        self._strict, self._row, self._shared = strict, row, shared

    def encode(self, rows: Sequence[Row], shared: Row | None = None) -> Inputs:
        """Encode rows, such as the candidates of a request.

        Args:
            rows: values of each row, keyed by column of the training table. None is a missing
                value. Other columns are ignored, or rejected if the encoder is strict.
            shared: columns with the same value for all rows. Their ids are stored once.

        Raises:
            ValueError: the column in the message is missing, misspelt or has a wrong value.
        """
        return self._inputs(self._features, rows, shared)

    def encode_user(self, request: Row) -> Inputs:
        """Encode the user features of a request for ``user.pt2``. Other columns are ignored.

        Raises:
            ValueError: the column in the message is missing or has a wrong value.
        """
        for one in self._user:
            if _find(request, one["column"]) is _ABSENT and not one.get("optional"):
                raise ValueError(
                    f"{self._shared}: column {one['column']!r} is missing. Add the column."
                )
        return self._inputs(self._user, [{}], request)

    def encode_candidates(self, rows: Sequence[Row], shared: Row | None = None) -> Inputs:
        """Encode the other features of rows for ``candidates.pt2``, as ``encode`` does.

        Raises:
            ValueError: the column in the message is missing, misspelt or has a wrong value, or is a
                user feature in a row.
        """
        inputs = self._inputs(self._candidates, rows, shared)
        for number, row in enumerate(rows):
            if columns := self.user_columns(row):
                raise ValueError(
                    f"{self._place(number)}: column {min(columns)!r} is a user feature. Move the "
                    f"column to {self._shared}."
                )
        return inputs

    def user_columns(self, row: Row) -> dict[str, Any]:
        """Return the columns of user features that a row has, with their values."""
        found = {one["column"]: _find(row, one["column"]) for one in self._user}
        return {name: value for name, value in found.items() if value is not _ABSENT}

    def _inputs(self, features: Sequence[Row], rows: Sequence[Row], shared: Row | None) -> Inputs:
        if not rows:
            raise ValueError(f"The list of {self._row}s is empty. Send at least one {self._row}.")
        shared = {} if shared is None else shared
        for number, row in enumerate([shared, *rows]):
            if not isinstance(row, Mapping):
                name = self._place(number - 1)
                raise ValueError(f"{name} is not an object. Send values keyed by column.")
        for number, row in enumerate([shared, *rows]):
            if not row.keys() <= self._known:
                self._check_names(row, shared, self._place(number - 1))
        found = Inputs([[] for _ in rows], {}, {}, {})
        for one in features:
            column, values = one["column"], [_find(row, one["column"]) for row in rows]
            once = (value := _find(shared, column)) is not _ABSENT
            if not once and one.get("optional"):
                values = [None if each is _ABSENT else each for each in values]
            for number, each in enumerate(values):
                if (each is _ABSENT) != once:
                    where, both = self._place(number), f"the {self._row} and in {self._shared}"
                    problem = f"is missing. Add the column to the {self._row} or to {self._shared}."
                    if once:
                        problem = f"is in {both}. Remove the value from the {self._row}."
                    raise ValueError(f"{where}: column {column!r} {problem}")
            made = _ids if one["kind"] in ("id", "ids") else _numbers
            encoded = [
                _encode(made, one, each, self._place(-1 if once else number))
                for number, each in enumerate([value] if once else values)
            ]
            if made is _ids:
                found.values[one["feature"]] = [id for ids in encoded for id in ids]
                found.lengths[one["feature"]] = [len(ids) for ids in encoded]
                found.rows[one["feature"]] = [0] * len(rows) if once else [*range(len(rows))]
            else:
                for number, dense in enumerate(found.dense):
                    dense += encoded[0 if once else number]
        return found

    def _place(self, number: int) -> str:
        """Return the name of a row in messages; -1 stands for the shared columns."""
        return self._shared if number < 0 else f"{self._row} {number}"

    def _check_names(self, row: Row, shared: Row, where: str) -> None:
        """Raise ValueError for a misspelt column or, if strict, for any unknown column."""
        known = self._known if self._strict else self._known - row.keys() - shared.keys()
        for name in row.keys() - self._known:
            close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
            if close or self._strict:
                remedy = f"Did you mean {close[0]!r}?" if close else "Remove the column."
                raise ValueError(f"{where}: unknown column {name!r}. {remedy}")


def _find(row: Any, column: str) -> Any:
    """Return the value of a column or struct field, or ``_ABSENT``."""
    if row is None:
        return None
    if not isinstance(row, Mapping):
        return _ABSENT
    first, _, rest = (column, "", "") if column in row else column.partition(".")
    if first not in row or not rest:
        return row.get(first, _ABSENT)
    if not isinstance(inner := row[first], list):
        return _find(inner, rest)
    found = [_find(each, rest) for each in inner]
    return _ABSENT if _ABSENT in found else found


def _encode(made: Callable[[Any, Row], list[Any]], one: Row, value: Any, where: str) -> list[Any]:
    try:
        return made(value, one)
    except (ValueError, TypeError, ArithmeticError) as error:
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(f"{where}: column {one['column']!r} is {text}. {error}") from error


def _is_missing(value: Any) -> bool:
    return value is None or value != value


def _ids(value: Any, one: Row) -> list[int]:
    """Return the int64 ids of a value; ``one`` is its feature in ``signature.json``."""
    if value == "" and one.get("empty_is_missing"):
        value = None
    if one["kind"] == "id":
        values = [value]
    else:
        separator = one.get("separator")
        if separator is not None and isinstance(value, str):
            value = _split(value, separator)
        is_single = not isinstance(value, list | tuple)
        takes_single = one.get("single") or separator is not None
        if is_single and not _is_missing(value) and not (takes_single and isinstance(value, _REAL)):
            raise ValueError("This column needs a list of ids.")
        values = [value] if is_single else list(value)
        if "max_length" in one:
            values = values[-one["max_length"] :]
    found = []
    for each in values:
        if not _is_missing(each):
            found.append(_ID[one["value"]](each, one))
        elif one["missing"] == "error":
            raise ValueError("The id is missing. Send an id.")
        elif one["missing"] != "empty":
            found.append(one["missing"])
    return found


def _split(text: str, separator: str) -> list[str]:
    inner = _BRACKETS.fullmatch(text) if separator.strip() in ("", ",") else None
    parts = ((inner[1] or inner[2] or "") if inner else text).split(separator)
    return [part for each in parts if (part := _bare(each.strip(), inner is not None))]


def _bare(part: str, is_in_brackets: bool) -> str:
    """Return a part of a text without quotes around it if the text has brackets."""
    quoted = len(part) > 1 and part[0] == part[-1] and part[0] in "'\""
    return part[1:-1] if quoted and is_in_brackets else part


def _integer(value: Any, one: Row) -> int:
    value = _boolean(value, one)
    if not isinstance(value, _REAL) or not math.isfinite(value) or value != int(value):
        what = "true and false. Send one" if one.get("boolean") else "integers. Send an integer"
        raise ValueError(f"Ids of this column are {what}.")
    if isinstance(value, float) and abs(value) >= 2**53:
        raise ValueError("A float of this size cannot represent every integer. Send an integer.")
    found = int(value)
    if one.get("unsigned") and 2**63 <= found < 2**64:
        found -= 2**64
    if not -(2**63) <= found < 2**63:
        raise ValueError("Ids are 64-bit integers. Send a smaller number.")
    return found


def _digits(value: Any, one: Row) -> int:
    if not isinstance(value, str):
        return _integer(value, one)
    if not re.fullmatch(r"-?\d{1,19}", value, re.ASCII):
        raise ValueError("Ids of this column are digits. Send an integer.")
    return _integer(int(value), one)


def _hashed(value: Any, one: Row) -> int:
    if one["value"] == "bytes" and isinstance(value, str):  # JSON has no bytes
        value = bytes.fromhex(value.replace("-", ""))
    elif one["value"] == "text" and isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise ValueError(f"Ids of this column are {one['value']}. Send {one['value']}.")
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "little") >> 1


_ID: dict[str, Callable[[Any, Row], int]] = {
    "integer": _integer,
    "digits": _digits,
    "text": _hashed,
    "bytes": _hashed,
    "time": lambda value, one: math.floor(_part_of_time(value, one)),
}


def _numbers(value: Any, one: Row) -> list[float]:
    """Return one finite number or, for a feature of lists, the ``width`` numbers of a list."""
    values = [value]
    if one["kind"] == "numbers":
        values = [None] * one["width"] if value is None or value == [] else value
        if not isinstance(values, list | tuple) or len(values) != one["width"]:
            raise ValueError(f"This column needs a list of {one['width']} numbers.")
    return [_finite(each, one) for each in values]


def _finite(value: Any, one: Row) -> float:
    number = math.nan if _is_missing(value) else _NUMBER[one["value"]](value, one)
    rule = one["missing"] if math.isnan(number) else number
    try:
        rounded = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        rounded = math.inf
    if math.isinf(rounded):
        rule = one["infinite"]
    if rule == "error":
        raise ValueError("This column needs a finite float32 number.")
    return rounded if rule is number and one.get("float32") else float(rule)


def _boolean(value: Any, one: Row) -> Any:
    """Return the bool of a text such as true or FALSE in a bool column, otherwise the value."""
    if one.get("boolean") and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _number(value: Any, one: Row) -> float:
    value = _boolean(value, one)
    if not isinstance(value, _REAL):
        raise ValueError("This column needs a number.")
    return float(value)


def _seconds(value: Any, one: Row) -> float:
    if isinstance(value, str):
        value = _parsed(datetime.time.fromisoformat, value, "a time of day, such as 10:00:00")
    if isinstance(value, datetime.time):
        value = datetime.datetime.combine(datetime.date.min, value) - datetime.datetime.min
    return value.total_seconds() if isinstance(value, datetime.timedelta) else _number(value, one)


def _part_of_time(value: Any, one: Row) -> float:
    """Return the hour of the day, weekday (Monday is 0) or days since 1970, with fractions."""
    micro = _microseconds(value, one["unit"])
    if one["by"] == "hour":
        return (micro % _DAY) / _HOUR
    return ((micro + 3 * _DAY) % (7 * _DAY)) / _DAY if one["by"] == "weekday" else micro / _DAY


_NUMBER: dict[str, Callable[[Any, Row], float]] = {
    "number": _number,
    "seconds": _seconds,
    "time": _part_of_time,
}


def _parsed(parse: Callable[[str], Any], text: str, form: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"This column needs {form}.") from error


def _microseconds(value: Any, unit: str) -> int:
    if isinstance(value, _REAL) and unit in _FORMATS:
        text = str(int(value))
        text *= len(text) == len(unit)  # strptime also accepts 2024501
        form = _FORMATS[unit]
        value = _parsed(
            lambda text: datetime.datetime.strptime(text, form), text, f"a date in the form {unit}"
        )
    elif isinstance(value, _REAL):
        per_second = _PER_SECOND[unit]
        if not abs(value) / per_second <= _LATEST_SECOND:
            raise ValueError(f"The time is too large for unit {unit}.")
        is_int = value == int(value)
        return int(value) * 10**6 // per_second if is_int else round(value / per_second * 10**6)
    if isinstance(value, str):
        value = _parsed(datetime.datetime.fromisoformat, value, _TIME)
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if not isinstance(value, datetime.datetime):
        raise ValueError(f"This column needs {_TIME}.")
    epoch = datetime.datetime(1970, 1, 1, tzinfo=value.tzinfo and datetime.UTC)
    return (value - epoch) // datetime.timedelta(microseconds=1)
