"""Training, evaluating and predicting under each registry, for processes of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from recd_plugin_runs.evaluate import EvaluateJob, evaluate
from recd_plugin_runs.predict import PredictJob, predict
from recd_plugins.runtime import activity
from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.trainer import Job, train


def predict_job(folder: Path, name: str, output: str, **options: Any) -> PredictJob:
    table, path = str(folder / "new.parquet"), folder / f"{name}.yaml"
    checkpoint = newest(folder / name)
    return PredictJob(path, checkpoint=checkpoint, table=table, output=folder / output, **options)


def trained(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        train(rank, world_size, Job(folder / f"{name}.yaml"))


def scored(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        job = predict_job(folder, name, f"{name}-{world_size}.parquet")
        overrides = {"evaluate": True}
        of_test = EvaluateJob(job.registry, checkpoint=job.checkpoint, overrides=overrides)
        found.append(evaluate(rank, world_size, of_test))
        assert predict(rank, world_size, job).rows == found[-1].test.num_samples
    return found


def scored_elsewhere(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        job = predict_job(folder, name, f"{name}-elsewhere.parquet")
        if rank == 0:
            job.prepare()
        assert predict(rank, world_size, job).rows == len(pq.read_table(job.table))


def refused(rank: int, world_size: int, path: Path, checkpoint: Path, table: str) -> str:
    try:
        job = PredictJob(path, checkpoint=checkpoint, table=table, output=path.with_suffix(".csv"))
        predict(rank, world_size, job)
    except RecdError as error:
        return str(error)
    return ""


def noted(rank: int, world_size: int, folder: Path) -> list[int]:
    changes = []
    for size in (8, 64):
        before = activity.current().changes
        job = predict_job(folder, "nothing", f"by {size}.parquet", batch_size=size)
        predict(rank, world_size, job)
        changes.append(activity.current().changes - before)
    return changes


def newest(folder: Path) -> Path:
    return max(folder.glob("step-*"))
