"""Which features are read most: a file with a count for each, as a scheduler of jobs keeps them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from recd_plugins.api import DataError


def read_popularity(path: Path, features: Sequence[str]) -> tuple[str, ...]:
    """The features that ``path`` names, those that are read most first.

    ``path`` is a JSON object ``{"feature": count}``, or text with a line ``feature,count`` for
    each, which may begin with a header. Counts of a feature that stands there twice add up; equal
    counts keep the order of ``features``.

    Raises:
        DataError: a line or value is not of this form, or names no feature; with file and line.
    """
    counts: dict[str, float] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    is_json = text.lstrip().startswith("{")
    pairs = _from_json(path, text) if is_json else _from_lines(path, text, features)
    for where, name, count in pairs:
        if name not in features:
            near = get_close_matches(name, features, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(features)}"
            raise DataError(f"{where}: the table has no feature {name}; {advice}")
        if not 0 <= count < float("inf"):
            raise DataError(f"{where}: the count of {name} is {count}, expected 0 or more")
        counts[name] = counts.get(name, 0) + count
    if not counts:
        raise DataError(f"{path}: names no feature; there are {', '.join(features)}")
    return tuple(
        sorted((name for name in features if name in counts), key=lambda name: -counts[name])
    )


def _from_json(path: Path, text: str) -> Iterator[tuple[str, str, float]]:
    try:
        found = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON: {error}") from error
    for name, count in found:
        if isinstance(count, bool) or not isinstance(count, int | float):
            raise DataError(f"{path}: the count of {name} is {count!r}, expected a number")
        yield str(path), name, count


def _from_lines(path: Path, text: str, features: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    for number, fields in enumerate(csv.reader(text.splitlines()), 1):
        if not fields:
            continue
        where = f"{path}:{number}"
        if len(fields) != 2:
            raise DataError(f"{where}: {','.join(fields)!r}; expected a feature, a comma, a count")
        name, count = (field.strip() for field in fields)
        try:
            yield where, name, float(count)
        except ValueError as error:
            # The first line may name the columns.
            if number > 1 or name in features:
                raise DataError(f"{where}: the count of {name} is {count!r}") from error
