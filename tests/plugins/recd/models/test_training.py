"""rm1, rm2 and rm3 train on 2 ranks, with the plugins as without them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from recd_plugin_recd.models.registry_text import rm_registry
from recd_plugins.registry import load_registry
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train


@pytest.fixture
def registry(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name, arguments = request.param
    path = tmp_path / "registry.yaml"
    text = rm_registry(
        name, folder=tmp_path, scale=0.03, rows=384, batch_size=32, steps=6, **arguments
    )
    path.write_text(text, encoding="utf-8")
    load_registry(path).dataset.prepare()
    return path


def cases(*names_and_arguments: tuple[str, dict[str, str]]) -> Iterable[object]:
    return [
        pytest.param(case, id="-".join([case[0], *case[1].values()]))
        for case in names_and_arguments
    ]


@pytest.mark.parametrize(
    "registry",
    cases(
        ("rm1", {}),
        ("rm2", {"converter": "recd.partial_ikjt", "pool_rows": "all"}),
        ("rm3", {"layout": "interleaved", "optimizer": "sgd"}),
    ),
    indirect=True,
)
def test_losses_are_those_of_stock_torchrec(registry: Path) -> None:
    baseline, _ = run_on_ranks(train, 2, Job(registry, "baseline"))
    plugins, _ = run_on_ranks(train, 2, Job(registry, "plugins"))
    assert len(baseline.losses) == len(plugins.losses) == 6
    assert np.abs(np.diff(baseline.losses)).max() > 1e-3, "nothing was learned"
    np.testing.assert_allclose(plugins.losses, baseline.losses, rtol=0, atol=1e-5)
