"""Train pipelines of plugins: the same losses, and faults that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins import load_registry
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job, train

PLUGINS = Path(__file__).parent / "plugins"
PIPELINES = ["test.loop", "torchrec.base", "torchrec.sparse_dist"]
CACHE = {"use": "scars.cache", "tables": ["t_item_0", "t_seq_0_0"], "options": {"rows": 10}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    load_registry(write(folder), plugins_dir=PLUGINS).dataset.prepare()
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Result:
    return trained(write(folder))


def write(folder: Path, pipeline: str = "", **sections: Any) -> Path:
    sparse, test = ["seq_0_0", "usr_0", "item_0"], f"{folder}/table"
    if pipeline:
        sections["pipeline"] = {"use": pipeline}
    return write_registry(
        folder,
        dataset=papercal(folder, 320, 64, test_path=test, sparse=sparse),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(100),
        pooling=[{"use": "recd.mean", "features": ["seq_0_0"]}],
        training={"batch_size": 32, "learning_rate": 0.1, "ranks": 2, "device": "auto"},
        **sections,
    )


def trained(path: Path) -> Result:
    return run_on_ranks(train, 2, Job(path, plugins_dir=PLUGINS))[0]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_losses_are_those_of_the_default(folder: Path, plain: Result, pipeline: str) -> None:
    found = trained(write(folder, pipeline))
    assert found.losses == plain.losses
    assert (found.train, found.test) == (plain.train, plain.test)
    assert found.test is not None


@pytest.mark.parametrize("pipeline", ["", PIPELINES[0]])
def test_caches_need_no_lookahead(folder: Path, plain: Result, pipeline: str) -> None:
    found = trained(write(folder, pipeline, cache=[CACHE]))
    assert found.losses == pytest.approx(plain.losses, abs=1e-6)
    assert found.test == plain.test


def test_another_pipeline_goes_on(folder: Path, plain: Result, tmp_path: Path) -> None:
    def run(path: Path, **overrides: Any) -> Result:
        resume = "steps" not in overrides
        overrides["checkpoint"] = {"path": str(tmp_path / "checkpoints"), "every": 2}
        with session(Job(path, plugins_dir=PLUGINS, overrides=overrides), resume=resume) as trainer:
            return trainer.train("plugins")

    run(write(folder, "torchrec.base"), steps=5)
    assert run(write(folder, "test.loop")).losses == plain.losses
