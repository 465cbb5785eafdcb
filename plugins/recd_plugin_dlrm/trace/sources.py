"""Where traces come from: a text file, or the training split of a registry's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.trace.text_file import read_text
from recd_plugins.api import DataError
from recd_plugins.api.registry import did_you_mean, shortened

if TYPE_CHECKING:
    from recd_plugins.api import FeatureLookups
    from recd_plugins.api.registry import RunConfig


@dataclass(frozen=True, eq=False)
class TraceRows:
    """Adjacent rows of the data.

    Attributes:
        ids: int64 ``[n]`` by feature, in the order of lookups.
        rows: how many they are.
    """

    ids: Mapping[str, NDArray[np.int64]]
    rows: int


def text_pieces(
    path: Path, columns: Sequence[str], features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """The pieces of a text file, of which a row is a number of each column.

    Args:
        path: see ``read_text``, as for ``columns``.
        features: the columns to take; without columns, what the ids are called.
        rows: read the first so many; None: all.
    """
    places = {name: columns.index(name) if columns else 0 for name in features}
    left = rows
    for numbers in read_text(path, columns):
        taken = numbers[:left]
        if left is not None:
            left -= len(taken)
        ids = {name: np.ascontiguousarray(taken[:, place]) for name, place in places.items()}
        yield TraceRows(ids, len(taken))
        if left == 0:
            return


def registry_pieces(
    registry: RunConfig, features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """The pieces of the training split of a registry's dataset, as preprocessing leaves them.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed.
    """
    from recd_plugins.api.access import training_rows
    from recd_plugins.api.registry import RegistryLookups

    lookups = RegistryLookups(registry)
    for batch in training_rows(registry, rows):
        found = lookups.of(batch, features)
        yield TraceRows({name: _in_order(found[name]) for name in features}, len(batch))


def choose(tables: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The tables that patterns match, or all.

    Raises:
        DataError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in tables):
            near = did_you_mean(pattern, list(tables)) or f"; the tables: {shortened(list(tables))}"
            raise DataError(f"--tables {pattern} matches no table{near}")
    if not patterns:
        return list(tables)
    return [table for table in tables if any(fnmatchcase(table, p) for p in patterns)]


def _in_order(lookups: FeatureLookups) -> NDArray[np.int64]:
    """The ids of every row, those of lists that several rows share once for each of them."""
    if lookups.inverse is None:
        return lookups.ids
    starts = lookups.offsets[:-1][lookups.inverse].astype(np.int64)
    lengths = np.diff(lookups.offsets)[lookups.inverse].astype(np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return lookups.ids[np.repeat(starts, lengths) + within]
