"""A run with coalesced tables, of bags and in tiers of rows, is the run without."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job


def train(folder: Path, coalesce: bool) -> Result:
    tiers = {"coalesce": coalesce, "budget": "3x", "minimise": "bytes", "memory_multiplier": 1}
    mlps = {"bottom_mlp": [16], "top_mlp": [16], "bag_pooling": "mean"}
    path = write_registry(
        folder,
        dataset=papercal(folder, 1024, 128, sparse=["usr_0", "usr_1", "seq_0_*"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(500),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        sharding=[
            {"use": "torchrec.row_wise", "tables": ["t_usr_*"], "options": {"coalesce": coalesce}},
            {"use": "flexshard.two_tier", "tables": ["t_seq_*"], "options": tiers},
        ],
        model={"embedding_dim": 8, "num_embeddings": 500, **mlps},
        training={"batch_size": 64, "ranks": 2, "steps": 6, "evaluate": False, "device": "auto"},
    )
    with session(Job(path)) as trainer:
        return trainer.train("plugins")


def test_a_run_is_that_without(tmp_path: Path) -> None:
    plain, coalesced = (train(tmp_path, each) for each in (False, True))
    assert coalesced.losses == pytest.approx(plain.losses, abs=1e-6)
    assert coalesced.ids_looked_up is not None
    assert plain.ids_looked_up is not None
    assert coalesced.ids_looked_up < 0.8 * plain.ids_looked_up
    assert "tiers" in plain.sections.keys() & coalesced.sections.keys()
