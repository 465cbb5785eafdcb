"""Names of other packages without a public form: listed, used, there, and told of in the docs."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.internals_scan import problems
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import shard_estimators

from recd_plugins import wrap
from recd_plugins.compat.torchrec_internals import (
    INTERNALS,
    refuse_other_versions,
)
from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.versions import Internal, refuse_missing

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "src/recd_plugins",
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
]


@pytest.fixture(scope="module")
def listed() -> dict[str, list[Internal]]:
    """By package: the framework's, and what plugins register."""
    found = {"recd_plugins": list(INTERNALS)}

    def add(internal: Internal, where: str) -> None:
        found.setdefault(where.split()[0].replace("-", "_"), []).append(internal)

    PluginManager().hand("register_internals", add)
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_they_are_listed_and_used(folder: Path, listed: dict[str, list[Internal]]) -> None:
    assert problems(folder, listed.get(folder.name, [])) == []


def test_the_installed_versions_have_them(listed: dict[str, list[Internal]]) -> None:
    refuse_missing(internal for internals in listed.values() for internal in internals)


SOURCE = """
from torch._C import _autograd
from torch import nn
import torch as t

class Ours(nn.Module):
    _mine = 1

    def forward(self, kernel):
        self._kept = kernel._local_rows, kernel._kept, getattr(kernel, "_optim", None)
        self._own_method(super()._bootstrap)
        return t._C, vars(t)["_jit"]

    def _own_method(self): ...
"""


def test_what_the_scan_sees(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/plugin.py").write_text(SOURCE, encoding="utf-8")
    found = problems(tmp_path / "acme", [Internal("torch", ("_C", "_gone"), "acme")])
    assert found == [
        f"acme/plugin.py:{line}: {name} is another package's and not listed"
        for line, name in [
            (2, "_autograd"),
            (10, "_local_rows"),
            (10, "_optim"),
            (11, "_bootstrap"),
            (12, "_jit"),
        ]
    ] + ["torch _gone is listed and not used"]


def test_the_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shard_estimators, "_get_optimizer_multipler")
    refuse_other_versions.cache_clear()
    table_a = EmbeddingBagConfig(name="a", num_embeddings=4, embedding_dim=4, feature_names=["a"])
    lacking = (
        f"torchrec {version('torchrec')} lacks torchrec.distributed.planner.shard_estimators."
        "_get_optimizer_multipler, which recd-plugins needs: install one of the sets"
    )
    with pytest.raises(SetupError, match=re.escape(lacking)):
        wrap(EmbeddingBagCollection(tables=[table_a]))


@pytest.mark.parametrize(
    ("internal", "what"),
    [
        (Internal("torch.gone", ("_x",), "a test"), "torch.gone"),
        (Internal("torch.nn", ("_x",), "a test"), "torch.nn._x"),
        (Internal("torch.nn:Module", ("_buffers", "_x"), "a test"), "Module._x"),
        (Internal("torch.nn.functional:relu", ("_x",), "a test"), "relu._x"),
    ],
)
def test_what_is_missing(internal: Internal, what: str) -> None:
    assert list(internal.missing()) == [
        f"torch {version('torch')} lacks {what}, which a test needs"
    ]
