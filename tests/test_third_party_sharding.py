"""A third party's sharding: a wheel, planned, trained with, resumed into stock shardings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.installed import pip_installed, python, recd

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_sharding"
HOT, STOCK = "hotrows.replicated, options: {rows: 20}", "torchrec.table_wise"

REGISTRY = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 256, sparse: {{user: 90, item: 90, shop: 9}}}}}}
converter: {{use: recd.ikjt, options: {{groups: [[item]]}}}}
pooling: [{{use: recd.mean, features: [user, item]}}]
sharding: [{{tables: [t_user, t_item], use: {sharding}}}]
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training:
  {{batch_size: 16, ranks: 2, evaluate: false, optimizer: sgd, learning_rate: 1.0,
    checkpoint: {{path: {folder}, every: 4}}}}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pip_installed(EXAMPLE, tmp_path_factory.mktemp("third_party_sharding"))


def written(folder: Path, sharding: str) -> Path:
    folder.mkdir(exist_ok=True)
    registry = folder / "registry.yaml"
    text = REGISTRY.format(folder=folder / "checkpoints", sharding=sharding)
    registry.write_text(text, encoding="utf-8")
    return registry


def run(environment: dict[str, str], registry: Path, *options: object) -> dict[str, Any]:
    figures = registry.with_suffix(".json")
    recd(environment, "run", registry, "--json", figures, *options)
    return json.loads(figures.read_text())


def test_training_is_the_same_and_goes_on_under_others(
    environment: dict[str, str], tmp_path: Path
) -> None:
    plain = run(environment, written(tmp_path / "plain", STOCK))["losses"]
    assert len(plain) == 8
    assert max(plain) - min(plain) > 1e-3  # it learns
    whole = run(environment, written(tmp_path / "whole", HOT))
    assert whole["losses"] == pytest.approx(plain, abs=1e-6)
    # 20 rows of two tables, 4 scalars each; on 2 ranks.
    sent = whole["hot_rows"]
    assert sent["hot_rows"] == {"counted": 2 * 640, "predicted": 2 * 640}
    # Ids of hot rows do not travel.
    assert sent["sharded_rows"]["predicted"] == pytest.approx(
        sent["sharded_rows"]["counted"], rel=0.02
    )
    for first, then in ((HOT, STOCK), (STOCK, HOT)):
        folder = tmp_path / first.partition(".")[0]
        run(environment, written(folder, first), "--steps", 4)
        resumed = run(environment, written(folder, then), "--resume")
        assert resumed["losses"] == pytest.approx(plain, abs=1e-6)


def test_a_plan_tells_what_it_takes(environment: dict[str, str], tmp_path: Path) -> None:
    plans = {}
    for sharding in (HOT, STOCK):
        registry = written(tmp_path / sharding.partition(".")[0], sharding)
        figures = registry.with_suffix(".json")
        options = ("--nodes", 1, "--ranks-per-node", 2, "--json", figures)
        shown = recd(environment, "plan", registry, *options)
        assert ("20 hot rows" in shown) == (sharding == HOT)
        plans[sharding] = json.loads(figures.read_text())
    hot, stock = (plans[sharding]["plugins"] for sharding in (HOT, STOCK))
    assert [table.get("hot_rows") for table in hot["tables"]] == [None, 20, 20]
    # Copies and their gradients.
    assert hot["memory_bytes"]["by_rank"]["hot rows"] == [2 * 640] * 2
    assert hot["seconds"]["all_to_all"] < stock["seconds"]["all_to_all"]
    assert hot["seconds"]["all_reduce"] > stock["seconds"]["all_reduce"]


def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests")
