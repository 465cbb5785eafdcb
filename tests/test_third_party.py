"""Third parties' packages: installed as wheels, found, trained with, and their own tests run."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from tests.installed import pip_installed, python, recd

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in ROOT.glob("examples/third_*"))
HOT, STOCK = "hotrows.replicated, options: {rows: 20}", "torchrec.table_wise"
REGISTRY = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 512, sparse: {{user: 300, item: 300, shop: 9}}}}}}
converter: {{use: recd.ikjt, options: {{groups: [[item]]}}}}
{sections}
model: {{embedding_dim: 4, num_embeddings: 300, bottom_mlp: [4], top_mlp: [4]}}
training:
  {{batch_size: 16, ranks: 2, evaluate: false, optimizer: sgd, learning_rate: 1.0,
    checkpoint: {{path: {folder}/checkpoints, every: 4}}}}
"""
POOLING = "pooling: [{use: recd.mean, features: [user, item]}]\n"

Environment = dict[str, str]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("third_party")
    for example in EXAMPLES:
        found = pip_installed(ROOT / "examples" / example, folder / example)
        shutil.copytree(found["PYTHONPATH"], folder / "site-packages", dirs_exist_ok=True)
    return {**found, "PYTHONPATH": str(folder / "site-packages")}


def written(folder: Path, sections: str) -> Path:
    folder.mkdir(exist_ok=True)
    registry = folder / "registry.yaml"
    registry.write_text(REGISTRY.format(folder=folder, sections=sections), encoding="utf-8")
    return registry


def run(environment: Environment, folder: Path, sections: str, *options: object) -> dict[str, Any]:
    registry = written(folder, sections)
    figures = registry.with_suffix(".json")
    recd(environment, "run", registry, "--json", figures, *options)
    return json.loads(figures.read_text())


@pytest.fixture(scope="module")
def plain(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = run(environment, tmp_path_factory.mktemp("plain"), POOLING)["losses"]
    assert len(losses) == 16
    assert max(losses) - min(losses) > 1e-3  # it learns
    return losses


def test_plugins_commands_and_kinds_are_found(environment: Environment) -> None:
    found = json.loads(recd(environment, "plugins", "--json"))
    names = {plugin["name"] for plugin in found if plugin["from"] == "recd-plugin-example 0.1.0"}
    assert names == {"example.drop_repeats", "example.recency"}
    assert "example." not in recd({**environment, "RECD_ONLY": "recd"}, "plugins", "--json")
    assert recd(environment, "example-hello") == "recd-plugin-example is installed\n"
    assert recd(environment, "tinylfu-memory", 1000) == "128,000 bytes\n"
    kinds = json.loads(recd(environment, "plugins", "--kinds", "--json"))
    (kind,) = (each for each in kinds if each["from"] == "recd-plugin-audit 0.1.0")
    assert (kind["kind"], kind["section"]) == ("audit", "audits")


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_own_tests_pass(environment: Environment, tmp_path: Path, example: str) -> None:
    shutil.copytree(ROOT / "examples" / example / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests")


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_examples_need_only_what_make_setup_installs() -> None:
    installed = {project(ROOT)["name"]}
    installed |= {project(file.parent)["name"] for file in ROOT.glob("plugins/*/pyproject.toml")}
    for example in EXAMPLES:
        needed = project(ROOT / "examples" / example)["dependencies"]
        assert {Requirement(each).name for each in needed} <= installed, example


def test_training_with_a_cache_tells_what_it_counted(
    environment: Environment, plain: list[float], tmp_path: Path
) -> None:
    cache = "cache: [{use: tinylfu.cache, tables: [t_user, t_item], options: {share: 0.2}}]\n"
    found = run(environment, tmp_path, POOLING + cache)
    assert found["losses"] == pytest.approx(plain, abs=1e-6)
    for table in found["tiny_lfu"].values():
        counted, predicted = table["counted"], table["predicted"]
        assert counted["admitted"] > 0
        assert counted["rejected"] > 0
        assert 0.3 < counted["hits"] / predicted["hits"] <= 1.2
        assert 0.8 < counted["bytes"] / predicted["bytes"] < 1.5


def test_training_with_a_kind_goes_on_counting(
    environment: Environment, plain: list[float], tmp_path: Path
) -> None:
    audit = f"use: audit.count_lookups, tables: [t_user], options: {{path: {tmp_path}/counts}}"
    sections = f"{POOLING}audits: [{{{audit}}}]\n"

    def lookups() -> list[dict[str, int]]:
        files = sorted((tmp_path / "counts").iterdir())
        return [json.loads(file.read_text())["lookups"] for file in files]

    # Steps of 16 rows with 10 ids each.
    run(environment, tmp_path, sections, "--steps", 4)
    assert lookups() == [{"t_user": 640}] * 2
    assert run(environment, tmp_path, sections, "--resume")["losses"] == plain
    assert lookups() == [{"t_user": 2560}] * 2


def sharding(use: str) -> str:
    return f"{POOLING}sharding: [{{tables: [t_user, t_item], use: {use}}}]\n"


def test_training_with_a_sharding_goes_on_under_another(
    environment: Environment, plain: list[float], tmp_path: Path
) -> None:
    whole = run(environment, tmp_path / "whole", sharding(HOT))
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
        run(environment, folder, sharding(first), "--steps", 4)
        resumed = run(environment, folder, sharding(then), "--resume")
        assert resumed["losses"] == pytest.approx(plain, abs=1e-6)


def test_a_plan_with_a_sharding_tells_what_it_takes(
    environment: Environment, tmp_path: Path
) -> None:
    plans = {}
    for use in (HOT, STOCK):
        registry = written(tmp_path / use.partition(".")[0], sharding(use))
        figures = registry.with_suffix(".json")
        options = ("--nodes", 1, "--ranks-per-node", 2, "--json", figures)
        shown = recd(environment, "plan", registry, *options)
        assert ("20 hot rows" in shown) == (use == HOT)
        plans[use] = json.loads(figures.read_text())
    hot, stock = (plans[use]["plugins"] for use in (HOT, STOCK))
    assert [table.get("hot_rows") for table in hot["tables"]] == [None, 20, 20]
    # Copies and their gradients.
    assert hot["memory_bytes"]["by_rank"]["hot rows"] == [2 * 640] * 2
    assert hot["seconds"]["all_to_all"] < stock["seconds"]["all_to_all"]
    assert hot["seconds"]["all_reduce"] > stock["seconds"]["all_reduce"]
