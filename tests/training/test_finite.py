from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import refusal
from tests.small_registry import write_registry

from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train

RANKS, BATCH_SIZE = 2, 8
DENSE = [f"x_{number}" for number in range(16)]


def registry(
    folder: Path,
    *,
    steps: int = 8,
    large: dict[int, list[str]] | None = None,
    large_in_test: bool = False,
) -> Path:
    """Write data with numbers that are too large for the model.

    Args:
        large: too large dense features by step, in two rows of rank 1.
        large_in_test: whether all features of the first test batch are too large.
    """
    half = steps * BATCH_SIZE  # rank 0 reads the first half of the rows
    rows = {half + (step - 1) * BATCH_SIZE: names for step, names in (large or {}).items()}
    write_table(folder / "train.parquet", 2 * half, rows)
    write_table(folder / "test.parquet", 2 * half, {0: DENSE})
    options: dict[str, Any] = {"path": f"{folder}/train.parquet", "sparse": ["ids"]}
    options["test_path"] = f"{folder}/test.parquet" if large_in_test else None
    checkpoint = {"path": f"{folder}/checkpoints", "every": 2, "keep": 2}
    return write_registry(
        folder,
        dataset={"use": "recd.session_parquet", "options": options},
        converter={"use": "recd.ikjt"},
        sharding=[{"use": "torchrec.row_wise", "tables": ["*"]}],
        model={"num_embeddings": 16, "bottom_mlp": [16], "top_mlp": [16]},
        training={"batch_size": BATCH_SIZE, "ranks": RANKS, "checkpoint": checkpoint},
    )


def write_table(path: Path, num_rows: int, large: dict[int, list[str]]) -> None:
    dense = {name: np.zeros(num_rows, np.float32) for name in DENSE}
    for row, names in large.items():
        for name in names:
            dense[name][row : row + 2] = 3e38
    number = np.arange(num_rows)
    ids = pa.array([[each % 16, 3] for each in range(num_rows)])
    columns = {"session_id": number, "ts": number, "ids": ids, "label": number % 2, **dense}
    pq.write_table(pa.table(columns), path, row_group_size=BATCH_SIZE)


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_loss_of_one_rank_ends_the_run_and_leaves_its_good_checkpoints(tmp_path: Path) -> None:
    path = registry(tmp_path, large={5: DENSE})
    figures = tmp_path / "figures.json"
    said = refusal("run", path, "--json", figures)
    assert f"{path}: the loss of step 5 is nan, so the run stopped" in said
    assert f"resume from the newest checkpoint, {tmp_path}/checkpoints/step-000000004" in said
    assert "Traceback" not in said
    assert saved_steps(tmp_path) == ["step-000000002", "step-000000004"]
    assert not figures.exists()


def test_a_state_that_is_not_finite_is_not_saved_though_the_losses_are(tmp_path: Path) -> None:
    """A squared gradient is infinite in Adagrad's state, and its row never learns again."""
    path = registry(tmp_path, large={5: ["x_0"]})
    (tmp_path / "checkpoints").mkdir()
    message = "optimizer state .*ids.* has a NaN or infinite value after step 6"
    with pytest.raises(RecdError, match=message):
        run_on_ranks(train, RANKS, Job(path))
    assert saved_steps(tmp_path) == ["step-000000002", "step-000000004"]


def test_a_loss_of_the_test_split_is_no_figure(tmp_path: Path) -> None:
    path = registry(tmp_path, steps=2, large_in_test=True)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RecdError, match="the loss of step 1 of the test split is nan"):
        run_on_ranks(train, RANKS, Job(path))
