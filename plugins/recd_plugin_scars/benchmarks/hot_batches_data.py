"""The data that ``recd bench hot_batches`` trains on, those of ``recd bench accuracy``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugins.api.registry import load_registry
from recd_plugins.testing.benchmark import Size

ROWS: dict[Size, int] = {"tiny": 8192, "small": 32_768, "reference": 393_216}
TEST_ROWS: dict[Size, int] = {"tiny": 1024, "small": 16_384, "reference": 65_536}
TEST_SEED = 1000
_ROW_GROUP_ROWS = 2048

# The label follows the first four features and the dense ones; the others are noise.
_SPARSE = ("seq_0_0", "usr_0", "item_0", "item_1", "usr_1", "item_2")
_COLUMNS = ["session_id", "ts", "label", *(f"dense_{i}" for i in range(13)), *_SPARSE]

PAPERCAL = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {path}, test_path: {test_path}, shuffle: true, seed: 0}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 200000}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
model: {{embedding_dim: 16, num_embeddings: 200000, bag_pooling: mean}}
training:
  batch_size: 256
  learning_rate: 0.2
  dense_learning_rate: 0.01
  eps: 1.0e-3
  device: cpu
"""

MOVIELENS = """
version: 1
dataset:
  use: recd.interactions
  options: {{path: {path}, order: time, refresh: {{per: request}}}}
converter: {{use: recd.ikjt}}
pooling:
  - {{use: recd.mean, features: ["history_*"]}}
model:
  embedding_dim: 16
  tables:
    t_user_id: {{num_embeddings: 944}}
    t_hour: {{num_embeddings: 24}}
    "t_*": {{num_embeddings: 1683}}
training:
  batch_size: 256
  learning_rate: 0.4
  dense_learning_rate: 0.01
  eps: 1.0e-3
  device: cpu
"""


def write_table(path: Path, rows: int, *, seed: int) -> None:
    """The columns of PAPERCAL, clustered by session, that the model uses, in their order."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        table, registry = Path(name) / "table", Path(name) / "registry.yaml"
        text = PAPERCAL.format(path=quoted(table), test_path="null").replace(
            "shuffle: true",
            f"generate: {{rows: {rows}, seed: {seed}, row_group_rows: {_ROW_GROUP_ROWS}}}",
        )
        registry.write_text(text, encoding="utf-8")
        load_registry(registry).dataset.prepare()
        (file,) = table.iterdir()
        with pq.ParquetFile(file) as generated:
            fields = [generated.schema_arrow.field(name) for name in _COLUMNS]
            with pq.ParquetWriter(path, pa.schema(fields), compression="zstd") as writer:
                for group in range(generated.num_row_groups):
                    read = generated.read_row_group(group, columns=_COLUMNS)
                    writer.write_table(read.select(_COLUMNS), row_group_size=_ROW_GROUP_ROWS)


def quoted(path: Path) -> str:
    """As a YAML string: a path may hold any character."""
    return json.dumps(str(path), ensure_ascii=False)
