from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import small_registry
from tests.small_registry import sections_over

from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train

#: Rows of each table; ids are hashed into them.
ROWS = 2000
SEQUENCES = ["t_seq_0_0", "t_seq_0_1", "t_seq_0_2"]
CACHED = ["t_item_0", *SEQUENCES]


def write_registry(
    path: Path, table: Path, options: dict[str, Any] | None = None, **sections: Any
) -> Path:
    """A registry of a small model over ``table``, whose entry ``scars.cache`` has ``options``."""
    cache = {"use": "scars.cache", "tables": ["t_seq_*", "t_item_0"], "options": options}
    training = {"batch_size": 32, "ranks": 2, "steps": 8, "evaluate": False, "learning_rate": 0.1}
    usual: dict[str, Any] = {
        **sections_over(table, ROWS),
        "pooling": [{"use": "recd.attention", "features": ["seq_*"]}],
        "cache": None if options is None else [cache],
        "training": {**training, **sections.pop("training", {})},
    }
    return small_registry.write_registry(path.parent, path.name, **usual | sections)


def train_each(rank: int, world_size: int, jobs: list[Job]) -> list[Result | str]:
    def result(job: Job) -> Result | str:
        try:
            return train(rank, world_size, job)
        except RecdError as error:
            return str(error)

    return [result(job) for job in jobs]
