"""rm1, rm2 and rm3 train on 2 ranks, with the plugins as without them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from recd_plugin_recd.models import rm_registry
from recd_plugins import load_registry
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train


@pytest.fixture
def registry(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name, arguments, changes = request.param
    path = tmp_path / "registry.yaml"
    text = rm_registry(
        name, folder=tmp_path, scale=0.03, rows=384, batch_size=32, steps=6, **arguments
    )
    for usual, other in changes.items():
        assert usual in text
        text = text.replace(usual, other)
    path.write_text(text, encoding="utf-8")
    load_registry(path).dataset.prepare()
    return path


def cases(*cases: tuple[str, dict[str, str], dict[str, str]]) -> Iterable[object]:
    """Model, arguments of ``rm_registry``, and what else is changed in its text."""
    return [pytest.param(case, id="-".join([case[0], *case[1].values()])) for case in cases]


@pytest.mark.parametrize(
    "registry",
    cases(
        ("rm1", {}, {}),
        ("rm2", {"converter": "recd.partial_ikjt"}, {"pool_rows: unique": "pool_rows: all"}),
        ("rm3", {"layout": "interleaved"}, {"optimizer: rowwise_adagrad": "optimizer: sgd"}),
    ),
    indirect=True,
)
def test_losses_are_those_of_stock_torchrec(registry: Path) -> None:
    baseline, _ = run_on_ranks(train, 2, Job(registry, "baseline"))
    plugins, _ = run_on_ranks(train, 2, Job(registry, "plugins"))
    assert len(baseline.losses) == len(plugins.losses) == 6
    assert baseline.losses[-1] < baseline.losses[0] - 0.005, "nothing was learned"
    np.testing.assert_allclose(plugins.losses, baseline.losses, rtol=0, atol=1e-5)
