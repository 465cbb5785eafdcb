"""docs/plugins/table-part.md: its section is reported."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks, page

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
