"""Fixtures of a small table and of registries over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recd_plugins import RunConfig, load_registry

# Few features, so that planning is quick.
SPARSE = ["item_0", "usr_0", "usr_1", "seq_0_*"]


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clustered table of 4096 rows, without statistics."""
    folder = tmp_path_factory.mktemp("small") / "table"
    from recd_plugin_recd.papercal_table import TableOptions, write_table

    write_table(folder, TableOptions(rows=4096, row_group_rows=1024))
    return folder


MakeRegistry = Callable[..., RunConfig]


@pytest.fixture
def make_registry(table: Path, tmp_path: Path) -> MakeRegistry:
    """Writes and loads a registry file; sections given by name replace the usual ones."""

    def make(**sections: Any) -> RunConfig:
        document: dict[str, Any] = {
            "version": 1,
            "dataset": {
                "use": "recd.session_parquet",
                "options": {"path": str(table), "sparse": SPARSE},
            },
            "converter": {"use": "recd.ikjt"},
            "preprocessing": [
                {"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": 1000}}
            ],
            "pooling": [{"use": "recd.attention", "features": ["seq_*"]}],
            "model": {"embedding_dim": 16, "num_embeddings": 1000},
            "training": {"batch_size": 256, "ranks": 2, "device": "cpu"},
        }
        document |= sections
        path = tmp_path / "registry.yaml"
        with path.open("w", encoding="utf-8") as stream:
            YAML().dump({key: value for key, value in document.items() if value}, stream)
        return load_registry(path)

    return make
