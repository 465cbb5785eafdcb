"""PAPERCAL in memory, as a reader hands it out: what benchmarks of later stages start from."""

from __future__ import annotations

from itertools import islice

import pyarrow as pa

from recd_plugin_recd.papercal import FEATURES, NUM_DENSE, chunks, make_rows, row_keys
from recd_plugins.api import FeatureSchema, Origin, Rows
from recd_plugins.api.tables import decoded_field, list_dict_field, to_list_dict

BATCH_SIZE = 4096
SCHEMA = FeatureSchema(
    sparse=tuple(feature.name for feature in FEATURES),
    dense=tuple(f"dense_{index}" for index in range(NUM_DENSE)),
    label="label",
)


def papercal_batches(count: int) -> list[Rows]:
    """The first batches of PAPERCAL clustered by session."""
    keys = chunks(row_keys(count * BATCH_SIZE, seed=1, layout="clustered"), BATCH_SIZE)
    return [
        Rows(make_rows(block), (Origin("PAPERCAL", number * BATCH_SIZE, BATCH_SIZE),))
        for number, block in enumerate(islice(keys, count))
    ]


def list_dict_batch(rows: Rows) -> Rows:
    """A batch as a table in layout ``list_dict`` hands it out; lists of items stay lists."""
    fields, columns = list(rows.data.schema), rows.data.columns
    for index, field in enumerate(fields):
        if field.name.startswith(("seq_", "usr_")):
            fields[index] = decoded_field(list_dict_field(field.name))
            columns[index] = to_list_dict(columns[index]).dictionary_encode()
    return Rows(pa.record_batch(columns, schema=pa.schema(fields)), rows.origins)
