"""A small registry in a folder of its own, and commands on it in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.small_registry import hashed, papercal, write_registry


def write(folder: Path, **training: object) -> Path:
    return write_registry(
        folder,
        dataset=papercal(folder, 1024, 256, sparse=["item_0", "usr_0", "seq_0_*"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(500),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        model={"embedding_dim": 8, "num_embeddings": 500, "bottom_mlp": [16], "top_mlp": [16]},
        training={"batch_size": 64, "ranks": 2, **training},
    )


@pytest.fixture
def folder(cwd: Path) -> Path:
    write(cwd)
    return cwd


plan = partial(invoke, "plan", "registry.yaml")
