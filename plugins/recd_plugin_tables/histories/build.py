"""Writes an event log as a store."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recd_plugin_tables.converter import Converter
from recd_plugin_tables.encoding import json_value
from recd_plugin_tables.histories.store import METADATA, ItemNote, StoreNote
from recd_plugin_tables.kinds import ColumnOptions, Unit, leaf_array, list_parts, plain, sort_of
from recd_plugin_tables.plan import SESSION, TIME, plan_columns
from recd_plugin_tables.sources import Source
from recd_plugin_tables.spill import Spill
from recd_plugin_tables.values import Texts
from recd_plugins.api import DataError, folders

# Maximum bytes of events in memory while the log is read.
_MEMORY = 1 << 29
# Minimum events per row group. Row groups end between users.
_ROW_GROUP_EVENTS = 1 << 20
_SECOND = 10**6
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class EventColumns:
    """Columns of an event log: user, time and items. Also the unit, if times are numbers."""

    user: str
    time: str
    items: tuple[str, ...]
    unit: Unit | None = None


def build_store(
    log: Source, target: Path, columns: EventColumns, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Write the events of a log to the store ``target``, sorted by user and time.

    Events with equal user and time keep their order. The file is written atomically.

    Args:
        log: the event log, in any order.
        target: the Parquet file to write.
        columns: columns of the log.
        progress: called with the number of rows in each part that was read.

    Returns:
        The number of stored events, and the number of rows skipped because a value is missing.
    """
    uses: dict[str, ColumnOptions] = {
        columns.user: ColumnOptions.model_validate({"as": "session", "missing": "drop"}),
        columns.time: ColumnOptions.model_validate(
            {"as": "time", "missing": "drop", "unit": columns.unit}
        ),
    }
    for name in columns.items:
        uses[name] = ColumnOptions.model_validate({"as": "id", "missing": "drop"})
    plan = plan_columns(log.location, log.schema, uses, others="unused", implicit=True)
    features = {use.leaf.name: use.name for use in plan.features}

    def arrays(batch: pa.RecordBatch) -> dict[str, pa.Array]:
        items = {name: list_parts(batch[features[name]])[1] for name in columns.items}
        return {columns.user: batch[SESSION], columns.time: batch[TIME], **items}

    with folders.scratch_folder(target) as scratch:
        texts = Texts(scratch / "texts")
        converter = Converter(replace(plan, keys=()), (), {}, "error", scoring=False, texts=texts)
        spill = Spill(scratch / "spill", converter.schema, _MEMORY, order="session")
        num_rows = 0
        samples: dict[str, Any] = {}
        limits: dict[str, tuple[int, int]] = {}
        step = _SECOND
        for rows in log.read(plan.columns):
            for use in plan.features:
                values = leaf_array(rows.data[use.leaf.path[0]], use.leaf).drop_null()
                samples[use.leaf.name] = samples.get(use.leaf.name) or json_value(values[:1])
            batch = converter.convert(rows, num_rows)
            for name, values in arrays(batch).items():
                found = [*limits.get(name, ()), *_min_max(values)]
                limits[name] = min(found), max(found)
            step = step if step == 1 or (batch[TIME].to_numpy() % _SECOND == 0).all() else 1
            spill.add(batch)
            num_rows += len(rows)
            progress(len(rows))
        kinds = {
            use.leaf.name: sort_of(plain(use.leaf.type))
            for use in (*plan.features, plan.session)
            if use is not None
        }
        if not limits:
            raise DataError(
                f"{log.location}: the log has no event with user, time and items. Check the "
                "columns that --user, --time and --items name."
            )
        note = StoreNote(
            user=columns.user,
            time=columns.time,
            user_kind=kinds[columns.user],
            unit=columns.unit,
            step=step,
            items=[ItemNote(name, kinds[name], samples.get(name)) for name in columns.items],
        )
        limits[columns.time] = limits[columns.time][0] // step, limits[columns.time][1] // step
        types = {name: _narrowest(*limits[name]) for name in limits} | {columns.user: pa.int64()}
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        schema = pa.schema(fields, metadata={METADATA: json.dumps(asdict(note))})
        new, num_events = scratch / "new.parquet", 0
        with _writer(new, schema) as writer:
            for table in _whole_users(map(arrays, spill.rows()), columns, step):
                writer.write_table(table.cast(schema), row_group_size=len(table))
                num_events += len(table)
        folders.put(new, target, scratch)
    return num_events, num_rows - num_events


def _min_max(values: pa.Array) -> tuple[int, ...]:
    found = pc.min_max(values)
    return tuple(each.as_py() for each in found.values() if each.is_valid)


def _narrowest(least: int, largest: int) -> pa.DataType:
    return pa.int32() if least >= -_LARGEST and largest <= _LARGEST else pa.int64()


def _whole_users(
    parts: Iterable[Mapping[str, pa.Array]], columns: EventColumns, step: int
) -> Iterator[pa.Table]:
    """Yield the events of sorted parts as tables. All events of a user are in one table."""
    waiting: list[pa.Table] = []
    for part in parts:
        times = pc.divide(part[columns.time], step)  # exact: times are multiples of step
        table = pa.table({**part, columns.time: times})
        users = part[columns.user].to_numpy()
        before = waiting[-1][columns.user][-1].as_py() if waiting else None
        starts = np.flatnonzero(np.concatenate([[users[0] != before], users[1:] != users[:-1]]))
        if sum(map(len, waiting)) + len(table) >= _ROW_GROUP_EVENTS and len(starts):
            waiting.append(table[: starts[-1]])
            if any(map(len, waiting)):
                yield pa.concat_tables(waiting)
            waiting, table = [], table[starts[-1] :]
        waiting.append(table)
    yield pa.concat_tables(waiting)


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet file for writing. All columns but the user have one page per row group."""
    user, *others = schema.names
    limits = {}
    if "max_rows_per_page" in inspect.signature(pq.ParquetWriter).parameters:
        limits["max_rows_per_page"] = _LARGEST
    return pq.ParquetWriter(
        path,
        schema,
        compression={user: "zstd", **dict.fromkeys(others, "none")},
        use_dictionary=[user],
        data_page_size=_LARGEST,
        write_page_index=True,
        write_page_checksum=True,
        **limits,
    )
