"""History features of ``tables.table`` with option ``store``."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_tables.histories.options import key_of_user
from recd_plugin_tables.histories.store import EventStore, ItemNote
from recd_plugin_tables.imported import ImportOptions
from recd_plugin_tables.plan import TIME
from recd_plugins.api import DataError, Rows, arrow, list_dict, row_tables

# Maximum number of ids of a history feature per yielded part.
_MOST_IDS = 1 << 22
# Largest plausible ratio between times of a store and of a table. Beyond it, their units differ.
_FACTOR = 50


class StoredHistories:
    """Adds the history features with option ``store`` to rows of an imported table."""

    def __init__(self, options: ImportOptions) -> None:
        self.options = options.stored_histories
        paths = {each.store for each in self.options.values() if each.store is not None}
        opened = {path: EventStore(path) for path in paths}
        self.stores = {n: opened[each.store] for n, each in self.options.items() if each.store}
        self._users: dict[str, tuple[str, str]] = {}
        for name, each in self.options.items():
            column = str(each.user_column(options.columns))
            self._users[name] = column, key_of_user(column, options.columns[column])
        self._units = {use.unit for use in options.columns.values() if "time" in use.roles}

    @property
    def keys(self) -> list[str]:
        """Columns of the import with the users and the time of a row."""
        return list(dict.fromkeys([TIME, *(key for _, key in self._users.values())]))

    def items(self) -> dict[str, ItemNote]:
        """Return the item column of each history."""
        return {name: self._item(name) for name in self.stores}

    def _item(self, name: str) -> ItemNote:
        items, chosen = self.stores[name].note.items, self.options[name].item
        found = next((each for each in items if chosen in (None, each.name)), None)
        if found is None:
            raise DataError(
                f"histories.{name}.item: {self.stores[name].path} has no item column {chosen!r}. "
                f"Use one of: {', '.join(repr(each.name) for each in items)}."
            )
        return found

    def contents(self) -> dict[str, Any]:
        """Return JSON values that identify the stored events of each history."""
        return {name: store.contents() for name, store in self.stores.items()}

    def check(
        self, kinds: dict[str, str], times: Sequence[int], where: object, rows: Rows | None
    ) -> list[str]:
        """Raise DataError if users or times of a store cannot match the table.

        Args:
            kinds: type categories of the table's columns, if known.
            times: sample of the table's times, in microseconds since 1970.
            where: path of the table.
            rows: first rows of the import, with columns ``keys``.

        Returns:
            A notice for each history whose users have no event before the last time.
        """
        notices = []
        for name, store in self.stores.items():
            note, (user, _) = store.note, self._users[name]
            self._item(name)
            if kinds.get(user, note.user_kind) != note.user_kind:
                raise DataError(
                    f"histories.{name}: users are {note.user_kind} in {store.path}, but "
                    f"{kinds[user]} in column {user!r} of {where}. Store them with the same type."
                )
            events = store.check()
            if min(*events, *times) > 0 and not 1 / _FACTOR < max(times) / events[1] < _FACTOR:
                unit = next(iter(self._units), None)
                raise DataError(
                    f"histories.{name}: events of {store.path} end at {_shown(events[1])} (unit "
                    f"{note.unit!r}), but rows of {where} at {_shown(max(times))} (unit {unit!r}). "
                    "Correct option 'unit' of the time column, or --unit of recd histories build."
                )
            if rows is not None:
                users, known = _single_ids(rows, self._users[name][1])
                latest = np.full(len(users), max(times))
                starts, stops = store.windows(users, latest, 1)
                if not (stops > starts)[known].any():
                    notices.append(
                        f"{where}: history {name!r} is empty in the first {len(rows):,} rows. "
                        f"Their users have no events before {_shown(max(times))} in {store.path}, "
                        f"whose events are from {_shown(events[0])} to {_shown(events[1])}."
                    )
        return notices

    def add(self, parts: Iterator[Rows], columns: Sequence[str]) -> Generator[Rows, None, None]:
        """Add the history columns, and yield only ``columns``. Large parts are split."""
        step = max(1, _MOST_IDS // max(each.last for each in self.options.values()))
        for rows in parts:
            for start in range(0, len(rows), step):
                part = row_tables.slice_rows(rows, start, min(step, len(rows) - start))
                yield self._added(part, columns)

    def _added(self, rows: Rows, columns: Sequence[str]) -> Rows:
        found = {each.name: (each, rows.data[each.name]) for each in rows.data.schema}
        times = rows.data[TIME].to_numpy()
        for name, options in self.options.items():
            users, known = _single_ids(rows, self._users[name][1])
            starts, stops = self.stores[name].windows(users, times, options.last)
            starts[~known], stops[~known] = 0, 0
            column = self.stores[name].lists(self._item(name).name, starts, stops)
            found[name] = list_dict.decoded_field(list_dict.list_dict_field(name)), column
        fields, arrays = zip(*(found[name] for name in columns), strict=True)
        return Rows(pa.record_batch([*arrays], schema=pa.schema(fields)), rows.origins)


def _single_ids(rows: Rows, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the id of each row, and a mask of the rows with an id. Missing ids are 0."""
    ids, offsets = arrow.sparse_column(rows, name)
    known = np.diff(offsets) > 0
    found = np.zeros(len(rows), np.int64)
    found[known] = ids[offsets[:-1][known]]
    return found, known


def _shown(microseconds: int) -> str:
    try:
        return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds):%Y-%m-%d}"
    except OverflowError:
        return f"{microseconds / 1e6:g} s after 1970"
