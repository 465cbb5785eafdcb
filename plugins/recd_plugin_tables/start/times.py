"""Which column of a table is the time, and what of it a number counts."""

from __future__ import annotations

import re

import pyarrow.types as pt

from recd_plugin_tables.leaves import plain
from recd_plugin_tables.start.names import ITEM, KEY_WORDS, SESSION, TIME, USER, named_so, words_of
from recd_plugin_tables.start.survey import Seen
from recd_plugin_tables.values.times import is_plausible

_IDS = re.compile("|".join((*SESSION, *USER, *ITEM)))


def time_column(found: list[Seen]) -> str | None:
    """Return the name of the time column.

    One with a matching name, else the first that holds times.
    """
    hourly = [seen for seen in found if not seen.daily]
    return (
        named_so(hourly, TIME, "time", _is_time)
        or named_so(found, TIME, "time", _is_time)
        or next((seen.leaf.name for seen in found if is_timestamp(seen)), None)
        or next((seen.leaf.name for seen in found if seen.rising and is_time_by_value(seen)), None)
    )


def is_timestamp(seen: Seen) -> bool:
    """Whether values are times by their type, or texts of times."""
    return seen.timed or bool(pt.is_timestamp(plain(seen.leaf.type)))


def is_stored_time(seen: Seen) -> bool:
    """Whether numbers are times, by their name and values or by their values alone."""
    return (named_so([seen], TIME, "time", _has_unit) is not None) or is_time_by_value(seen)


def is_time_by_value(seen: Seen) -> bool:
    """Whether numbers can hardly be anything else than times, whatever their name is.

    Ids of 10, 13, 16 or 19 digits may look like seconds or parts of them. They do not rise from row
    to row, and usually repeat.
    """
    name = words_of(seen.leaf.path[-1])
    if seen.unit is None or KEY_WORDS.search(name) or _IDS.fullmatch(name):
        return False
    if seen.least is None or seen.largest is None:
        return False
    if seen.unit.startswith("Y"):
        return seen.distinct > 2
    if not is_plausible(seen.least, seen.largest, seen.unit):
        return False
    rare = seen.unit in ("ms", "us") and seen.distinct > seen.values / 2
    return seen.distinct > 2 and (seen.rising or rare)


def _has_unit(seen: Seen) -> bool:
    return seen.unit is not None


def _is_time(seen: Seen) -> bool:
    kind = plain(seen.leaf.type)
    return bool(pt.is_timestamp(kind) or pt.is_date(kind)) or seen.timed or _has_unit(seen)
