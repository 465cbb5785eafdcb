"""`recd run` with cached tables, killed and resumed: as if never killed, and as without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.programs import report_of, run_until_killed
from tests.small_registry import hashed, papercal, write_registry


def write(folder: Path, **sections: Any) -> Path:
    training = {"batch_size": 32, "ranks": 2, "steps": 12, "evaluate": False}
    return write_registry(
        folder,
        dataset=papercal(folder, 2560, 128, sparse=["item_0", "seq_0_*"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(500),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        sharding=[{"use": "torchrec.row_wise", "tables": ["*"]}],
        model={"embedding_dim": 8, "num_embeddings": 500, "bottom_mlp": [16], "top_mlp": [16]},
        training={**training, **sections.pop("training", {})},
        **sections,
    )


def test_killed_and_resumed(tmp_path: Path) -> None:
    plain = report_of("run", write(tmp_path))
    options = {"policy": "lru", "share": 0.2, "storage": {"file": str(tmp_path / "rows")}}
    checkpoints = tmp_path / "checkpoints"
    path = write(
        tmp_path,
        cache=[{"use": "scars.cache", "tables": ["*"], "options": options}],
        training={"checkpoint": {"path": str(checkpoints), "every": 3, "keep": 1}},
    )
    run_until_killed(path, checkpoints, every=3, steps=12)
    assert report_of("run", path, "--resume")["losses"] == plain["losses"]
