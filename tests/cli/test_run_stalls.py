"""`recd run` shows what the trainer waits for data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import forked
from tests.forked import RECD
from tests.small_registry import papercal, write_registry

SLOW = '''
import time

from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import Preprocessing


class Slow(Preprocessing):
    """Takes its time."""

    name = "test.slow"

    def transform(self, values, offsets):
        time.sleep(0.2)
        return values % 2000, offsets


@hookimpl
def register_preprocessing():
    return [Slow]
'''


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_is_named(tmp_path: Path, workers: int) -> None:
    write_registry(
        tmp_path,
        dataset=papercal(tmp_path, 2048, 256, sparse=["item_0"]),
        converter={"use": "recd.ikjt"},
        preprocessing=[{"use": "test.slow", "features": ["item_0"]}],
        model={"num_embeddings": 2000},
        training={"batch_size": 64, "ranks": 1, "steps": 14, "evaluate": False},
    )
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "slow.py").write_text(SLOW, encoding="utf-8")
    options = ["--json", "report.json", "--workers", str(workers), "-v"]
    done = forked.run(
        [RECD, "--plugins-dir", "plugins", "run", "registry.yaml", *options],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["stalls"]
    assert found["worst"]["rank"] == 0
    # 14 steps: 5 are left out, and 2 take no batch.
    assert found["steps"] == 7
    shares = found["shares"]
    assert max(shares, key=lambda cause: shares[cause]) == "preprocess"
    (rank,) = found["ranks"]
    assert rank["making"]["preprocess"] >= 0.2
    assert (rank["making"]["arrival"] > 0) == (workers > 0)
    assert found["share"] == pytest.approx(sum(rank["seconds"].values()) / rank["step_seconds"])
    words = " ".join(done.stdout.split())
    assert "waiting for data, share of a step" in words
    assert "mostly for preprocess" in words
