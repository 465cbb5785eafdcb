"""``recd doctor``: installations that do and do not fit together, and models of trainers."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest
from click.testing import CliRunner, Result
from tests.commands import invoke, refusal

from recd_plugins.cli import doctor, main
from recd_plugins.runtime.versions import fbgemm_has_cuda, installed_set

REAL = [PurePosixPath("fbgemm_gpu/__init__.py"), PurePosixPath("fbgemm_gpu-1.8.0.dist-info/RECORD")]
Install = Callable[[dict[str, str]], None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make the given distributions look like all that is installed."""

    def installed(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        installed_set.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "files", lambda _: REAL)

    yield installed
    installed_set.cache_clear()


def test_this_machine_is_well() -> None:
    result = invoke("doctor", "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 0, found
    for name in ("versions", "fbgemm build", "fbgemm", "plugins"):
        assert found[name]["status"] == "ok", found[name]


TORCH_213 = "with torch 2.13 install fbgemm 1.8.* and torchrec 1.8.*"
ANY_SET = "install one of these sets of versions: torch 2.11, fbgemm 1.6"


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm", "remedy"),
    [
        ("2.11.0", "1.6.0", "1.6.0", ""),
        ("2.12.1+cpu", "1.7.0", "1.7.0", ""),
        ("2.14.0", "1.9.2", "1.9.2", ""),
        ("2.13.0", "1.7.0", "1.8.0", TORCH_213),
        ("2.13.0", "1.8.0", "1.6.0", TORCH_213),
        ("2.9.0", "1.8.0", "1.8.0", ANY_SET),
    ],
)
def test_packages(installed: Install, torch: str, torchrec: str, fbgemm: str, remedy: str) -> None:
    installed({"torch": torch, "torchrec": torchrec, "fbgemm-gpu-cpu": fbgemm})
    check = doctor._versions()
    assert check.status == ("failed" if remedy else "ok")
    assert remedy in check.remedy
    assert ("are not compatible: " in invoke("run", "missing.yaml").stderr) == bool(remedy)


@pytest.mark.parametrize(
    ("builds", "cuda", "status"),
    [
        ({"fbgemm-gpu": "1.8.0+cu130"}, True, "ok"),
        ({"fbgemm-gpu": "1.8.0+cpu"}, False, "ok"),
        ({"fbgemm-gpu-cpu": "1.8.0"}, False, "ok"),
        ({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, False, "failed"),
        ({}, False, "failed"),
    ],
)
def test_fbgemm_builds(installed: Install, builds: dict[str, str], cuda: bool, status: str) -> None:
    installed(builds)
    assert fbgemm_has_cuda() is cuda
    assert doctor._one_fbgemm().status == status


def test_a_check_that_breaks_is_a_failure_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Check:
        raise OSError("libfbgemm.so: undefined symbol")

    monkeypatch.setattr(doctor, "_fbgemm_operators", broken)
    said = refusal("doctor")
    assert "undefined symbol" in said
    assert "reinstall torch, fbgemm-gpu and torchrec" in said


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
        "again": EmbeddingBagCollection([of(EmbeddingBagConfig, "clicks")]),
        "sequence": EmbeddingCollection([of(EmbeddingConfig, "history")]),
        "mine": Mine([of(EmbeddingBagConfig, "item")]),
    })
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


def test_tables_features_and_what_is_left_alone(folder: Path) -> None:
    entry = "sharding: [{use: torchrec.row_wise, tables: [t_history]}]"
    (folder / "mine.yaml").write_text(f"version: 1\n{entry}\n", encoding="utf-8")
    options = "--ranks", "4", "--registry", "mine.yaml"
    done = look("my_trainer:build", *options)
    assert done.exit_code == 0, done.output
    for words in (
        "Adagrad, in backward",
        "nobody: module 'mine' has the type Mine, a subclass of EmbeddingBagCollection",
        "not deduplicated: history, because EmbeddingCollection does not pool",
    ):
        assert words in done.output
    lines = json.loads(look("my_trainer:build", "--json", *options).stdout)["tables"]
    default = "exact_sgd, lr 0.01 (FBGEMM's default)"
    found = {line["sharded_by"]: line["optimizer"] for line in lines if line["name"] == "t_clicks"}
    assert sorted(found.values()) == ["Adagrad, in backward", default]
    assert [line["sharding"] for line in lines if line["name"] == "t_history"] == ["row_wise"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_trainer", "has no function name"),
        ("my_trainr:build", "No module named 'my_trainr'"),
        ("my_trainer:missing", "AttributeError"),
    ],
)
def test_what_is_no_model_is_said(folder: Path, name: str, message: str) -> None:
    done = look(name)
    assert done.exit_code != 0
    assert message in str(done.exception) + done.output
