"""A third party's kind of plugins: installed as a wheel, found, tested, and used in training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.installed import pip_installed, python, recd

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_kind"
REGISTRY = """version: 1
dataset: {{use: dlrm.random, options: {{rows: 256, sparse: {{user: 90, item: 90, shop: 9}}}}}}
converter: {{use: recd.ikjt, options: {{groups: [[item]]}}}}
sharding: [{{use: torchrec.row_wise, tables: [t_user]}}]
{audits}model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training:
  batch_size: 16
  ranks: 2
  evaluate: false
  checkpoint: {{path: {folder}/checkpoints, every: 4}}
"""
AUDITS = """audits:
  - {{use: audit.count_lookups, tables: [t_user, t_shop], options: {{path: {folder}/lookups}}}}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pip_installed(EXAMPLE, tmp_path_factory.mktemp("third_party_kind"))


def run(environment: dict[str, str], folder: Path, audits: str, *options: object) -> list[float]:
    registry, figures = folder / "registry.yaml", folder / "figures.json"
    audits = audits.format(folder=folder)
    registry.write_text(REGISTRY.format(folder=folder, audits=audits), encoding="utf-8")
    recd(environment, "run", registry, "--json", figures, *options)
    return json.loads(figures.read_text())["losses"]


def lookups(folder: Path) -> list[dict[str, int]]:
    files = sorted((folder / "lookups").iterdir())
    return [json.loads(file.read_text())["lookups"] for file in files]


def test_training_is_the_same_with_it_and_goes_on_counting(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("plain", "whole", "parts"):
        (tmp_path / name).mkdir()
    plain = run(environment, tmp_path / "plain", "")
    assert len(plain) == 8
    assert run(environment, tmp_path / "whole", AUDITS) == plain
    # 8 steps of 16 rows with 10 ids each.
    assert lookups(tmp_path / "whole") == [{"t_user": 1280, "t_shop": 1280}] * 2

    run(environment, tmp_path / "parts", AUDITS, "--steps", 4)
    assert lookups(tmp_path / "parts") == [{"t_user": 640, "t_shop": 640}] * 2
    assert run(environment, tmp_path / "parts", AUDITS, "--resume") == plain
    assert lookups(tmp_path / "parts") == lookups(tmp_path / "whole")


def test_it_is_found_and_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    (kind,) = (
        kind
        for kind in json.loads(recd(environment, "plugins", "--kinds", "--json"))
        if kind["from"] == "recd-plugin-audit 0.1.0"
    )
    assert (kind["kind"], kind["section"]) == ("audit", "audits")
    assert "audit.count_lookups" in recd(environment, "plugins", "--kind", "audit")
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests")
