from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked
from tests.small_registry import write_registry

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.trainer import BatchSource, Job, train


@dataclass(frozen=True)
class Batch:
    number: int


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Batch]:
        while self.position < 3:
            self.position += 1
            yield Batch(self.position)
        self.position = 0

    def num_left(self) -> int:
        return 3 - self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}


def source(loader: Loader, *arguments: Any) -> BatchSource:
    return BatchSource(loader, *arguments)  # type: ignore[arg-type]


def test_what_is_read_ahead_is_not_trained() -> None:
    loader = Loader()
    feeding = source(loader)
    batches = iter(feeding)
    assert [next(batches), next(batches), next(batches)] == [Batch(1), Batch(2), Batch(3)]
    assert feeding.trained() == Progress(1, 0, {"position": 1})
    assert feeding.trained() == Progress(2, 0, {"position": 2})
    assert list(batches) == []
    assert feeding.trained() == Progress(3, 0, {"position": 3})


def test_epochs_and_steps() -> None:
    assert len(list(source(Loader(), None, 2))) == 6
    assert len(list(source(Loader(), None, 2, 4))) == 4
    feeding = source(Loader(), Progress(3, 1), 3, 8)
    assert len(list(feeding)) == 5
    assert [feeding.trained().epoch for _ in range(5)] == [1, 1, 1, 2, 2]


def test_an_epoch_that_was_just_finished() -> None:
    loader = Loader()
    loader.position = 3
    assert list(source(loader, Progress(3, 0), 2)) == [Batch(1), Batch(2), Batch(3)]


def test_ranks_have_what_the_run_began_with(tmp_path: Path) -> None:
    tracker = {"use": "trackers.jsonl", "options": {"path": f"{tmp_path}/run.jsonl"}}
    path = write_registry(tmp_path, callbacks=[tracker], training={"steps": 3})
    text = path.read_text()
    path.write_text(text.replace('"steps": 3', '"steps": 5'))
    (result,) = run_on_ranks(train, 1, Job(path, text=text))
    assert len(result.losses) == 3
    first, *_ = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["registry"] == text


#: Each rank finds a checkpoint of its own to be the newest.
PROGRAM = """
import os
from pathlib import Path
from recd_plugins.api import load_registry
from recd_plugins.api import trained_models

class Job(trained_models.TrainedJob):
    def prepare(self):
        print("prepares", self.checkpoint.name)

def tell(rank, world_size, job):
    print("scores by", job.checkpoint.name)

path = Path("registry.yaml")
job = Job(path, checkpoint=Path(f"kept/step-00000000{os.environ['RANK']}"))
trained_models.on_ranks(load_registry(path), tell, job)
"""


def test_all_ranks_take_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    write_registry(tmp_path)
    done = forked.torchrun([sys.executable, "-c", PROGRAM], ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ["prepares step-000000000", *["scores by step-000000000"] * 2]
    assert done.stdout.splitlines() == expected
