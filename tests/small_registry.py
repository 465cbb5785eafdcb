"""A small table and registries for tests."""

from __future__ import annotations

import json
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
            "preprocessing": hashed(1000),
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


def random_rows(rows: int = 64, **options: Any) -> dict[str, Any]:
    return {
        "use": "dlrm.random",
        "options": {"rows": rows, "sparse": {"user": 90, "item": 90}, **options},
    }


def papercal(folder: Path, rows: int, row_group_rows: int, **options: Any) -> dict[str, Any]:
    generate = {"rows": rows, "row_group_rows": row_group_rows}
    return {
        "use": "recd.session_parquet",
        "options": {"path": f"{folder}/table", "generate": generate, **options},
    }


def hashed(buckets: int) -> list[dict[str, Any]]:
    return [{"use": "recd.sigrid_hash", "features": ["*"], "options": {"buckets": buckets}}]


def sections_over(table: Path, rows: int) -> dict[str, Any]:
    """Sections of a registry over ``table``, whose ids are hashed into ``rows`` rows."""
    return {
        "version": 1,
        "dataset": {
            "use": "recd.session_parquet",
            "options": {"path": str(table), "sparse": ["item_0", "usr_0", "seq_0_*"]},
        },
        "converter": {"use": "recd.ikjt"},
        "preprocessing": hashed(rows),
        "model": {"embedding_dim": 8, "num_embeddings": rows, "top_mlp": [16]},
    }


def write_registry(folder: Path, name: str = "registry.yaml", **sections: Any) -> Path:
    """Write a small registry, one section a line.

    Sections replace the usual ones; ``model`` and ``training`` are merged, and None drops one.
    """
    document: dict[str, Any] = {
        "version": 1,
        "dataset": random_rows(),
        "converter": {"use": "recd.kjt"},
        "model": {"embedding_dim": 4, "num_embeddings": 100, "bottom_mlp": [4], "top_mlp": [4]},
        "training": {"batch_size": 16, "device": "cpu"},
    }
    for section, value in sections.items():
        merged = section in ("model", "training") and value is not None
        document[section] = {**document[section], **value} if merged else value
    lines = [f"{key}: {json.dumps(each)}\n" for key, each in document.items() if each is not None]
    path = folder / name
    path.write_text("".join(lines), encoding="utf-8")
    return path
