"""The synthetic PAPERCAL data set in memory and on disk, ordered by time or by session."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import pyarrow as pa

from recd_plugin_recd.papercal import FEATURES, NUM_DENSE, chunks, make_rows, row_keys
from recd_plugin_recd.papercal import SCHEMA as TABLE
from recd_plugins.api import FeatureSchema, Origin, Rows, SessionKeys
from recd_plugins.data.list_dict import Layout, decoded_field, list_dict_field, to_list_dict
from recd_plugins.data.table_writer import TableWriter

BATCH_SIZE = 4096
SCHEMA = FeatureSchema(
    sparse=tuple(feature.name for feature in FEATURES),
    dense=tuple(f"dense_{index}" for index in range(NUM_DENSE)),
    label="label",
)
#: ``stream``: by time, cut from a stream of a million concurrent rows. ``clustered``: by session.
Order = Literal["stream", "clustered"]
# Item ids repeat only by chance, so their columns stay plain lists.
_LAYOUTS: Mapping[str, Layout] = {
    name: "list_dict" for name in TABLE.names if name.startswith(("seq_", "usr_"))
}


@dataclass(frozen=True)
class Settings:
    """Storage settings of a Parquet table."""

    layout: Layout
    row_group_rows: int = 8192
    compression_level: int = 3


def papercal_batches(count: int) -> list[Rows]:
    """Return the first ``count`` batches of the synthetic table, clustered by session."""
    keys = chunks(row_keys(count * BATCH_SIZE, seed=1, layout="clustered"), BATCH_SIZE)
    return [
        Rows(make_rows(block), (Origin("PAPERCAL", number * BATCH_SIZE, BATCH_SIZE),))
        for number, block in enumerate(islice(keys, count))
    ]


def list_dict_batch(rows: Rows) -> Rows:
    """Return a batch whose lists are dictionary-encoded, as read from a table in that layout."""
    fields, columns = list(rows.data.schema), rows.data.columns
    for index, field in enumerate(fields):
        if field.name.startswith(("seq_", "usr_")):
            fields[index] = decoded_field(list_dict_field(field.name))
            columns[index] = to_list_dict(columns[index]).dictionary_encode()
    return Rows(pa.record_batch(columns, schema=pa.schema(fields)), rows.origins)


def write_tables(
    folder: Path, rows: int, tables: Mapping[str, tuple[Order, Settings]]
) -> dict[str, Path]:
    """Write Parquet tables of ``rows`` rows. Tables with the same order contain the same rows."""
    paths = {name: folder / f"{name}.parquet" for name in tables}
    for order in {order for order, _ in tables.values()}:
        with ExitStack() as stack:
            writers = []
            for name, (its_order, each) in tables.items():
                if its_order == order:
                    writer = TableWriter(
                        paths[name],
                        TABLE,
                        keys=SessionKeys("session_id", "ts"),
                        layout=_LAYOUTS if each.layout == "list_dict" else "list",
                        row_group_rows=each.row_group_rows,
                        compression_level=each.compression_level,
                    )
                    writers.append(stack.enter_context(writer))
            for keys in chunks(row_keys(rows, seed=0, layout=order), 8192):
                batch = make_rows(keys)
                for writer in writers:
                    writer.write(batch)
    return paths
