"""A small table of sequences, and registries with flexshard over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.small_registry import sections_over

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
        entry = {"use": use, "tables": ["t_seq_*"], "options": options or {}}
        document: dict[str, Any] = {
            **sections_over(table, ROWS),
            "pooling": [{"use": "recd.mean", "features": ["seq_*"]}],
            "sharding": [entry],
        }
        document |= sections
        document["training"] = {
            "batch_size": 32, "ranks": 4, "ranks_per_node": 2, "steps": 6, "device": "cpu",
            "evaluate": False, **document.get("training", {}),
        }  # fmt: skip
        path = tmp_path / "registry.yaml"
        with path.open("w", encoding="utf-8") as stream:
            YAML().dump({key: value for key, value in document.items() if value}, stream)
        return path

    return make
