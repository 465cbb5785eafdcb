"""``recd doctor --model``: what would become of a trainer's tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main

TRAINER = """
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torch import nn, optim
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

class Mine(EmbeddingBagCollection):
    pass

def build():
    of = lambda cls, name: cls(
        name=f"t_{name}", embedding_dim=8, num_embeddings=100, feature_names=[name]
    )
    bags = EmbeddingBagCollection([of(EmbeddingBagConfig, "clicks")])
    apply_optimizer_in_backward(optim.Adagrad, bags.parameters(), {"lr": 0.1})
    return nn.ModuleDict({
        "bags": bags,
        "sequence": EmbeddingCollection([of(EmbeddingConfig, "history")]),
        "mine": Mine([of(EmbeddingBagConfig, "item")]),
    })

def twice():
    of = lambda: EmbeddingBagCollection([EmbeddingBagConfig(
        name="t_clicks", embedding_dim=8, num_embeddings=100, feature_names=["clicks"]
    )])
    first, second = of(), of()
    apply_optimizer_in_backward(optim.Adagrad, first.parameters(), {"lr": 0.1})
    return nn.ModuleList([first, second])

def broken():
    raise ValueError("no table today")

def nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_trainer.py").write_text(TRAINER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_trainer", None)


def look(name: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--model", name, *options])


@pytest.mark.usefixtures("folder")
def test_tables_features_and_what_is_left_alone() -> None:
    done = look("my_trainer:build", "--ranks", "4")
    assert done.exit_code == 0, done.output
    clicks, history, item = (
        next(line for line in done.output.splitlines() if line.startswith(f"t_{name}"))
        for name in ("clicks", "history", "item")
    )
    assert "Adagrad, in backward" in clicks
    assert clicks.endswith("ExactEmbeddingBagCollectionSharder bags")
    assert "exact_sgd, lr 0.01 (FBGEMM's default)" in history
    assert "nobody: mine is a Mine, a subclass of EmbeddingBagCollection" in item
    assert "deduplicated by dedup(loader): clicks\n" in done.output
    assert "as it comes: history, as an EmbeddingCollection has rows for ids" in done.output
    assert "as it comes: item, mine is a Mine" in done.output


@pytest.mark.usefixtures("folder")
def test_tables_of_one_name_have_each_its_own_optimizer() -> None:
    lines = json.loads(look("my_trainer:twice", "--json").stdout)["tables"]
    assert [line["name"] for line in lines] == ["t_clicks", "t_clicks"]
    assert [line["optimizer"] for line in lines] == [
        "Adagrad, in backward",
        "exact_sgd, lr 0.01 (FBGEMM's default)",
    ]


@pytest.mark.usefixtures("folder")
def test_as_json() -> None:
    found = json.loads(look("my_trainer:build", "--json").stdout)
    assert [line["name"] for line in found["tables"]] == ["t_clicks", "t_history", "t_item"]
    assert found["deduplicated"] == ["clicks"]


@pytest.mark.usefixtures("folder")
def test_entries_of_a_file_count(folder: Path) -> None:
    entry = "sharding: [{use: torchrec.row_wise, tables: [t_clicks]}]"
    (folder / "mine.yaml").write_text(f"version: 1\n{entry}\n", encoding="utf-8")
    found = json.loads(look("my_trainer:build", "--json", "--registry", "mine.yaml").stdout)
    assert found["tables"][0]["sharding"] == "row_wise"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_trainer", "expected MODULE:FACTORY"),
        ("my_trainr:build", "No module named 'my_trainr'"),
        ("my_trainer:buidl", "has no attribute 'buidl'"),
        ("my_trainer:broken", "ValueError: no table today"),
        ("my_trainer:nothing", "nothing() returned 3, no module"),
    ],
)
def test_what_is_no_model_is_said(name: str, message: str) -> None:
    done = look(name)
    assert done.exit_code != 0
    assert message in str(done.exception) + done.output
