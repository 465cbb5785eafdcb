"""The trainer of docs/trainer.md runs under torchrun, and its signatures are those of the code."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from tests import forked

import recd_plugins
from recd_plugins.planning.prepared import Prepared

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "trainer.md").read_text()

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {path: table, test_path: table, generate: {rows: 512, row_group_rows: 128}}
converter: {use: recd.ikjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 100}}
pooling:
  - {use: recd.mean, features: ["seq_*"]}
model: {embedding_dim: 4, num_embeddings: 100, bottom_mlp: [8], top_mlp: [8]}
training: {batch_size: 32}
"""


TIERS = """
sharding:
  - {use: flexshard.two_tier, tables: ["t_seq_*"], options: {memory_multiplier: 1.0}}
"""


@pytest.mark.parametrize("sharding", ["", TIERS], ids=["planned", "tiered"])
def test_the_trainer_runs(tmp_path, sharding):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "registry.yaml").write_text(REGISTRY + sharding)
    (tmp_path / "trainer.py").write_text(script)
    done = forked.torchrun([sys.executable, "trainer.py"], ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^last loss \d\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^test AUC [01]\.\d+$", done.stdout, re.MULTILINE)


def test_the_signatures_are_as_shown():
    shown = dict(re.findall(r"^\| `([\w.]+)(\(.*?\))` \|", PAGE, re.MULTILINE))
    assert len(shown) == 6
    for name, signature in shown.items():
        owner, _, function_name = name.rpartition(".")
        function = getattr(Prepared if owner else recd_plugins, function_name)
        whole = inspect.signature(function)
        plain = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in whole.parameters.values()
            if parameter.name != "self"
        ]
        assert str(inspect.Signature(plain)) == signature
