"""Which column of a table is the time, and what of it a number counts."""

from __future__ import annotations

import pyarrow.types as pt

from recd_plugin_tables.leaves import plain
from recd_plugin_tables.start.names import TIME, named_so
from recd_plugin_tables.start.survey import Seen

_EPOCH = {"s": (1e8, 1e10), "ms": (1e11, 1e13), "us": (1e14, 1e16), "ns": (1e17, 1e19)}


def time_column(found: list[Seen]) -> str | None:
    """The column that is when it was: by its name, or the first time."""
    named = named_so(found, TIME, "time", _is_time)
    return named or next((seen.leaf.name for seen in found if is_timestamp(seen)), None)


def is_timestamp(seen: Seen) -> bool:
    """Whether values are times by their type, or texts of times."""
    return seen.timed or bool(pt.is_timestamp(plain(seen.leaf.type)))


def _is_time(seen: Seen) -> bool:
    kind = plain(seen.leaf.type)
    return bool(pt.is_timestamp(kind) or pt.is_date(kind)) or seen.timed or bool(unit_of(seen))


def unit_of(seen: Seen) -> str | None:
    """Of a time that is stored as a number; None where it is none."""
    if seen.least is None or seen.largest is None:
        return None
    for unit, (first, last) in _EPOCH.items():
        if first <= seen.least and seen.largest <= last:
            return unit
    return None
