"""A small table of sequences, and registries with flexshard over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_registry import sections_over, write_registry

from recd_plugin_recd.papercal_table import TableOptions, write_table

#: Rows of each table; ids are hashed into them.
ROWS = 2000
SEQUENCES = ["t_seq_0_0", "t_seq_0_1", "t_seq_0_2"]
#: A cluster on which every tier pays.
ELSEWHERE = {"topology": "zionex-a100-40g", "nodes": 4, "ranks_per_node": 8, "batch_size": 256}


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flexshard") / "table"
    write_table(folder, TableOptions(rows=2048, row_group_rows=1024))
    return folder


MakeRegistry = Callable[..., Path]


@pytest.fixture
def make_registry(table: Path, tmp_path: Path) -> MakeRegistry:
    """Writes a registry file for 2 nodes of 2 ranks; gets the ``use`` and options of its entry."""

    def make(use: str, options: dict[str, Any] | None = None, **sections: Any) -> Path:
        training = {"batch_size": 32, "ranks": 4, "ranks_per_node": 2, "steps": 6}
        usual: dict[str, Any] = {
            **sections_over(table, ROWS),
            "pooling": [{"use": "recd.mean", "features": ["seq_*"]}],
            "sharding": [{"use": use, "tables": ["t_seq_*"], "options": options or {}}],
            "training": {**training, "evaluate": False, **sections.pop("training", {})},
        }
        return write_registry(tmp_path, **usual | sections)

    return make
