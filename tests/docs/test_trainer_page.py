"""The trainer of docs/trainer.md runs under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {path: table, generate: {rows: 512, row_group_rows: 128}}
converter: {use: recd.ikjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 100}}
pooling:
  - {use: recd.mean, features: ["seq_*"]}
model: {embedding_dim: 4, num_embeddings: 100, bottom_mlp: [8], top_mlp: [8]}
training: {batch_size: 32}
"""


def test_the_trainer_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "trainer.md").read_text(), re.S)
    (tmp_path / "registry.yaml").write_text(REGISTRY)
    (tmp_path / "trainer.py").write_text(script)
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", "trainer.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^last loss \d\.\d+$", done.stdout, re.MULTILINE)
