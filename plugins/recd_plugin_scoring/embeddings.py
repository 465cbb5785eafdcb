"""Rows of a trained table in a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugins.api.batches import fitted_steps
from recd_plugins.api.files import new_file
from recd_plugins.api.model import table_name
from recd_plugins.api.registry import RunConfig, plugin_call
from recd_plugins.api.training import check_same_preprocessing, load_fitted, table_weights

_ROWS_AT_ONCE = 65_536


def write_embeddings(registry: RunConfig, checkpoint: Path, table: str, output: Path) -> int:
    """Write ``id``, ``vector`` and maybe ``value`` of each row; says how many.

    Args:
        registry: whose model it is.
        checkpoint: of its run.
        table: its name.
        output: a Parquet file.

    Raises:
        RecdError: the checkpoint is damaged or has no such table, or other preprocessing than the
            registry, or the place cannot be written.
    """
    weights = table_weights(checkpoint, table).numpy()
    values = _values(registry, checkpoint, table, len(weights))
    with new_file(output) as temporary:
        writer: pq.ParquetWriter | None = None
        for start in range(0, len(weights), _ROWS_AT_ONCE):
            some = weights[start : start + _ROWS_AT_ONCE]
            columns: dict[str, pa.Array] = {"id": pa.array(np.arange(start, start + len(some)))}
            if values is not None:
                columns["value"] = values.slice(start, len(some))
            flat = pa.array(np.ascontiguousarray(some, np.float32).reshape(-1))
            columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, weights.shape[1])
            batch = pa.RecordBatch.from_pydict(columns)
            writer = writer or pq.ParquetWriter(temporary, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    return len(weights)


def _values(registry: RunConfig, checkpoint: Path, table: str, num_rows: int) -> pa.Array | None:
    """What preprocessing made each id of, where all features of the table have one vocabulary."""
    load_fitted(registry, checkpoint)
    check_same_preprocessing(checkpoint, registry)
    schema = registry.dataset.schema()
    features = [name for name in schema.sparse if table_name(name) == table]
    steps = fitted_steps(registry, schema)
    last = {id(chain[-1]): chain[-1] for name in features if (chain := steps.get(name))}
    if len(last) != 1:
        return None
    (step,) = last.values()
    with plugin_call(step, "original_values"):
        values: Sequence[Any] | None = step.original_values()
    if values is None:
        return None
    texts: dict[int, str] = {}
    for feature in features:
        texts.update(registry.dataset.texts(feature))
    found = pa.array([texts.get(each) for each in values] if texts else values)
    # Rows that no value becomes.
    return pa.concat_arrays([found, pa.nulls(max(0, num_rows - len(found)), found.type)])
