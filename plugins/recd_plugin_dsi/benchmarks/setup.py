"""The table, the registry files and the model that the parts share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: Of ``bench.slow``.
PLUGINS = Path(__file__).parent / "reader_plugins"
BATCH = 64
#: Batches of a row group, which a reader makes in one go.
BLOCK = 2

_REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: {table}}}}}
converter: {{use: recd.kjt}}
preprocessing:
  - {{use: bench.slow, features: [row], options: {{seconds: {seconds}, by: {by}{seen}}}}}
{ingestion}
model: {{embedding_dim: 16, num_embeddings: {rows}, bottom_mlp: [64], top_mlp: [1024, 1024]}}
training: {{batch_size: {batch}, workers: {workers}, device: cpu, evaluate: false}}
"""


def write_table(path: Path, batches: int) -> None:
    """Rows that know their number: the only id of feature ``row``."""
    rows = batches * BATCH
    random = np.random.default_rng(0)
    number = np.arange(rows)
    columns = {
        "session_id": pa.array(number // 8),
        "ts": pa.array(number),
        "label": pa.array(random.integers(0, 2, rows).astype(np.int8)),
        "dense_0": pa.array(random.random(rows, np.float32)),
        "row": pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), number),
    }
    pq.write_table(pa.table(columns), path, row_group_size=BATCH * BLOCK)


def write_registry(
    folder: Path,
    name: str,
    batches: int,
    *,
    seconds: float = 0.0,
    by: str = "waiting",
    workers: int = 0,
    ray: str | None = None,
    seen: Path | None = None,
) -> Path:
    """A registry file in which preprocessing of a batch takes ``seconds``.

    Args:
        folder: with the table.
        name: of the file.
        batches: of the table.
        seconds, by, seen: options of ``bench.slow``.
        workers: of each rank.
        ray: options of ``dsi.ray``, which reads where they are given.
    """
    path = folder / f"{name}.yaml"
    text = _REGISTRY.format(
        table=folder / "table.parquet",
        rows=batches * BATCH,
        batch=BATCH,
        seconds=seconds,
        by=by,
        seen="" if seen is None else f", seen: {seen}",
        workers=workers,
        ingestion="" if ray is None else f"ingestion: {{use: dsi.ray, options: {{{ray}}}}}",
    )
    path.write_text(text, encoding="utf-8")
    return path
