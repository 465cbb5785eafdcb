"""Names of other packages without a public form: listed, used, there, and told of in the docs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from tests.internals_scan import problems

from recd_plugins.compat.torchrec_internals import INTERNALS
from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.versions import Internal

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "src/recd_plugins",
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
]


@pytest.fixture(scope="module")
def listed() -> dict[str, list[Internal]]:
    """By package: the framework's, and what plugins register."""
    found = {"recd_plugins": list(INTERNALS)}

    for hooks, origin, _ in PluginManager()._installed_first():
        own = found.setdefault(origin.split()[0].replace("-", "_"), [])
        own += [each for returned in hooks.hook.register_internals() for each in returned]
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_they_are_listed_and_used(folder: Path, listed: dict[str, list[Internal]]) -> None:
    assert problems(folder, listed.get(folder.name, [])) == []


def test_the_installed_versions_have_them(listed: dict[str, list[Internal]]) -> None:
    missing = [m for internals in listed.values() for each in internals for m in each.missing()]
    assert missing == []


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
