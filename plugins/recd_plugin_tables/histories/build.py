"""Writes stores of events."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_tables.converter import Converter
from recd_plugin_tables.encoding import json_value
from recd_plugin_tables.histories.store import METADATA, ItemNote, StoreNote
from recd_plugin_tables.kinds import ColumnOptions, Unit, leaf_array, list_parts, plain, sort_of
from recd_plugin_tables.plan import SESSION, TIME, plan_columns
from recd_plugin_tables.sources import Source
from recd_plugin_tables.spill import Spill
from recd_plugin_tables.values import Texts
from recd_plugins.api import DataError, SessionKeys, folders, parquet_writer

# Bytes of events that stay in memory while the log is read.
_MEMORY = 1 << 29
_ROW_GROUP_EVENTS = 1 << 17


@dataclass(frozen=True)
class EventColumns:
    """Columns of an event log: the user, the time with the unit of numeric times, and the items."""

    user: str
    time: str
    items: tuple[str, ...]
    unit: Unit | None = None


def build_store(
    log: Source, target: Path, columns: EventColumns, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Write the events of a log to the store ``target``, sorted by user and time.

    Events with equal user and time keep their order. The file appears when it is complete.

    Args:
        log: the event log, in any order.
        target: the Parquet file to write.
        columns: columns of the log.
        progress: called with a number of rows read.

    Returns:
        Number of events, and of rows left out because a value is missing.
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
    with folders.scratch_folder(target) as scratch:
        texts = Texts(scratch / "texts")
        converter = Converter(replace(plan, keys=()), (), {}, "error", scoring=False, texts=texts)
        spill = Spill(scratch / "spill", converter.schema, _MEMORY, order="session")
        num_rows = 0
        samples: dict[str, Any] = {}
        for rows in log.read(plan.columns):
            for use in plan.features:
                values = leaf_array(rows.data[use.leaf.path[0]], use.leaf).drop_null()
                samples[use.leaf.name] = samples.get(use.leaf.name) or json_value(values[:1])
            spill.add(converter.convert(rows, num_rows))
            num_rows += len(rows)
            progress(len(rows))
        kinds = {
            use.leaf.name: sort_of(plain(use.leaf.type))
            for use in (*plan.features, plan.session)
            if use is not None
        }
        note = StoreNote(
            columns.user,
            columns.time,
            kinds[columns.user],
            columns.unit,
            [ItemNote(name, kinds[name], samples.get(name)) for name in columns.items],
        )
        schema = pa.schema(
            [pa.field(name, pa.int64()) for name in (columns.user, columns.time, *columns.items)],
            metadata={METADATA: json.dumps(asdict(note))},
        )
        new = scratch / "new.parquet"
        with parquet_writer.TableWriter(
            new,
            schema,
            keys=SessionKeys(columns.user, columns.time),
            row_group_rows=_ROW_GROUP_EVENTS,
        ) as writer:
            for batch in spill.rows():
                items = [list_parts(batch[features[name]])[1] for name in columns.items]
                writer.write(pa.record_batch([batch[SESSION], batch[TIME], *items], schema=schema))
        if not writer.num_rows:
            raise DataError(
                f"{log.location}: the log has no event with user, time and items. Check the "
                "columns that --user, --time and --items name."
            )
        folders.put(new, target, scratch)
    return writer.num_rows, num_rows - writer.num_rows
