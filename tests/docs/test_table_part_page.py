"""docs/plugins/table-part.md: its section is reported, and tables go where it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.docs.pages import blocks, page

from recd_plugins.cli import main
from recd_plugins.training.session import session

PAGE = page("plugins/table-part.md")
REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: "{folder}"
    sparse: [usr_0, "seq_0_*"]
    generate: {{rows: 2048, row_group_rows: 256}}
converter: {{use: recd.ikjt}}
preprocessing: [{{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 200}}}}]
pooling: [{{use: recd.mean, features: ["seq_*"]}}]
sharding: [{{use: acme.counted, tables: ["t_seq_*"]}}]
model: {{embedding_dim: 8, num_embeddings: 200, bottom_mlp: [8], top_mlp: [8]}}
training: {{batch_size: 64, ranks: 2, steps: 8, device: cpu, evaluate: false}}
"""


def test_its_section_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme_counted.py").write_text(blocks(PAGE, "python")[0])
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.format(folder=tmp_path / "table"))
    with session(path, plugins_dir=tmp_path / "plugins", overrides={}) as trainer:
        result = trainer.train("plugins")
    sent = result.as_json()["acme_sent"]["acme_all_to_all"]
    assert 0 < sent <= result.collective_bytes["all_to_all"]
    (shown,) = result.sections["acme_sent"].shown("")
    assert shown == f"acme_all_to_all: {sent:,.0f} bytes a step"


PLACED = '''
from recd_plugins.api import Sharding, TableStrategy, hookimpl

{part}


class PlacedTables(Sharding):
    """Has such a part."""

    name = "acme.placed"

    def part(self, tables, setting):
        return Placed(tables, setting) if tables else None


@hookimpl
def register_shardings():
    return [PlacedTables]
'''
TABLES = """
version: 1
dataset: {{use: dlrm.random, options: {{rows: 256, sparse: {{user: 90, item_a: 90, item_b: 9}}}}}}
converter: {{use: recd.ikjt}}
sharding: [{{use: {use}, tables: ["*"]}}]
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 16, ranks: 2, ranks_per_node: 1, device: cpu, evaluate: false}}
"""


def test_tables_go_where_a_part_says(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    text = PLACED.format(part=blocks(PAGE, "python")[1])
    (tmp_path / "plugins" / "acme_placed.py").write_text(text)
    losses = {}
    for use in ("torchrec.table_wise", "acme.placed"):
        path = tmp_path / f"{use}.yaml"
        path.write_text(TABLES.format(use=use))
        with session(path, plugins_dir=tmp_path / "plugins", overrides={}) as trainer:
            losses[use] = trainer.train("plugins").losses
    assert losses["acme.placed"] == pytest.approx(losses["torchrec.table_wise"], abs=1e-6)
    plan = ["--plugins-dir", str(tmp_path / "plugins"), "plan", str(path)]
    done = CliRunner().invoke(main, [*plan, "--json", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    shown = "".join(done.stdout.split())
    assert f"t_user:onrank0,saysacme.placed({path}:5sharding[0])" in shown
    assert "t_item_a:t_item_a,t_item_btogetherononeofranks0,1,saysacme.placed" in shown
    tables = json.loads((tmp_path / "plan.json").read_text())["plugins"]["tables"]
    ranks = {table["name"]: (table["ranks"], table["allowed_ranks"]) for table in tables}
    assert ranks["t_user"] == ([0], [0])
    # The rank that has less to do.
    assert ranks["t_item_a"] == ranks["t_item_b"] == ([1], [0, 1])
