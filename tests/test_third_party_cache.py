"""A third party's cache policy: installed as a wheel, trained with, counted and predicted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.installed import pip_installed, python, recd

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_cache"
REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 512, sparse: {user: 300, item: 300, shop: 9}}}
converter: {use: recd.ikjt, options: {groups: [[item]]}}
pooling: [{use: recd.mean, features: [item]}]
sharding: [{use: torchrec.row_wise, tables: [t_user]}]
cache: [{use: tinylfu.cache, tables: [t_user, t_item], options: {share: 0.2}}]
model: {embedding_dim: 4, num_embeddings: 300, bottom_mlp: [4], top_mlp: [4]}
training: {batch_size: 16, ranks: 2, evaluate: false}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pip_installed(EXAMPLE, tmp_path_factory.mktemp("third_party_cache"))


def test_training_is_the_same_and_tells_what_it_counted(
    environment: dict[str, str], tmp_path: Path
) -> None:
    cached, plain = tmp_path / "cached.yaml", tmp_path / "plain.yaml"
    cached.write_text(REGISTRY, encoding="utf-8")
    plain.write_text(REGISTRY.replace("cache: [", "# ["), encoding="utf-8")
    results = {}
    for registry in (cached, plain):
        figures = registry.with_suffix(".json")
        shown = recd(environment, "run", registry, "--json", figures)
        results[registry] = json.loads(figures.read_text())
        assert ("TinyLFU: a step of all ranks" in shown) == (registry == cached)
    assert len(results[plain]["losses"]) == 16
    assert results[cached]["losses"] == pytest.approx(results[plain]["losses"], abs=1e-6)
    for table in results[cached]["tiny_lfu"].values():
        counted, predicted = table["counted"], table["predicted"]
        assert counted["admitted"] > 0
        assert counted["rejected"] > 0
        assert 0.3 < counted["hits"] / predicted["hits"] <= 1.2
        assert 0.8 < counted["bytes"] / predicted["bytes"] < 1.5


def test_its_command_runs_and_its_own_tests_pass(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert recd(environment, "tinylfu-memory", 1000) == "128,000 bytes\n"
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests")
