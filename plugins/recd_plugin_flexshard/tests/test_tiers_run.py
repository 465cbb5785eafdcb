"""`recd run` with tiers of rows: what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    sparse: ["seq_*", item_0, usr_0]
    generate: {{rows: 1280, row_group_rows: 64, layout: interleaved}}
converter: {{use: {converter}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 2000}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
sharding:
  # Tiers as on a larger cluster, so that none of them is empty.
  - use: flexshard.three_tier
    tables: ["t_seq_[01]_*"]
    options:
      profile_rows: null
      retier_every: {retier_every}
      sync: dense  # so that all-to-alls are those of ids and embeddings
      plan_for: {{topology: zionex-a100-40g, nodes: 2, batch_size: 128}}
model: {{embedding_dim: 8, num_embeddings: 2000, bottom_mlp: [16], top_mlp: [16]}}
training:
  batch_size: 32
  ranks: 4
  ranks_per_node: 2
  learning_rate: 0.02
  eps: 1.0e-3
  evaluate: false
  device: cpu
  checkpoint: {checkpoint}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


def write(
    folder: Path,
    converter: str = "recd.ikjt",
    checkpoints: Path | None = None,
    retier_every: int | None = None,
) -> Path:
    path = folder / "registry.yaml"
    checkpoint = "{}" if checkpoints is None else f"{{path: {checkpoints}}}"
    path.write_text(
        REGISTRY.format(
            folder=folder,
            converter=converter,
            checkpoint=checkpoint,
            retier_every=json.dumps(retier_every),
        ),
        encoding="utf-8",
    )
    return path


def run(registry: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["run", str(registry), *map(str, arguments)])


def report_of(registry: Path, *arguments: object) -> dict[str, Any]:
    path = registry.with_name("report.json")
    done = run(registry, *arguments, "--json", path)
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**report, "output": done.stdout}


def test_predicted_bytes_are_those_of_the_wire(folder: Path) -> None:
    registry = write(folder, converter="recd.kjt")
    found = {
        wire: report_of(registry, "--steps=8", f"training.wire={wire}")["tiers"]
        for wire in ("fp32", "bf16")
    }
    assert found["bf16"]["other_tables"]  # whose bytes are in those of cold rows
    for tier in ("cold", "flex"):
        full, half = (found[wire]["tiers"][tier] for wire in ("fp32", "bf16"))
        assert half["observed"] < 0.65 * full["observed"]
        assert half["ratio"] == pytest.approx(full["ratio"], rel=0.02)


def test_tiers_are_counted_next_to_their_prediction(folder: Path) -> None:
    report = report_of(
        write(folder, converter="recd.kjt", retier_every=6),
        "--steps=8",
        "--sharding=flexshard.three_tier",
        "--sharding=torchrec.row_wise",
    )
    assert report["loss_max_abs_diff"]["torchrec.row_wise"] < 1e-6
    row_wise, tiered = (
        report["shardings"][name] for name in ("torchrec.row_wise", "flexshard.three_tier")
    )
    assert "tiers" not in row_wise
    found = tiered["tiers"]
    tiers = found["tiers"]
    assert [tiers[name]["group"] for name in tiers] == ["global", "global", "node", "cross"]
    # Gradients of copies have the size of the copies, whatever the batch.
    assert tiers["hot"]["ratio"] == tiers["flex_gradients"]["ratio"] == 1
    assert found["other_tables"] == ["t_seq_2_0", "t_seq_2_1", "t_seq_2_2"]
    # The bags send the same under both.
    bags = tiered["collective_bytes"]["all_to_all"] - sum(
        tiers[name]["observed"] for name in ("cold", "flex")
    )
    sent = row_wise["collective_bytes"]["all_to_all"] - bags
    assert found["row_wise"] == found["plain_row_wise"]
    # Counted in one step, whose 128 rows have fewer ids than the mean that is predicted.
    fewer = sent / found["row_wise"]
    assert fewer == pytest.approx(1, abs=0.2)
    assert tiers["cold"]["ratio"] == pytest.approx(fewer, rel=0.1)
    assert tiers["flex"]["ratio"] == pytest.approx(fewer, rel=0.1)
    reduction = found["a2a_reduction"]
    assert 1 - tiers["cold"]["observed"] / sent == pytest.approx(reduction["predicted"], abs=0.05)
    left = tiers["cold"]["observed"] / found["plain_row_wise"]
    assert reduction["observed"] == pytest.approx(1 - left)
    for words in ("flexshard.three_tier, tiers of rows", "flex gradients", "across nodes"):
        assert words in report["output"]
    (moved,) = found["retierings"]
    assert moved["step"] == 6
    assert 0 <= moved["a2a_share_after"] <= moved["a2a_share_before"] <= 1
