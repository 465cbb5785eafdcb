"""The position of training is behind that of reading, whatever a pipeline takes ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.trainer import BatchSource


@dataclass(frozen=True)
class Batch:
    """What a source knows of a batch."""

    number: int

    @property
    def groups(self) -> dict[str, int]:
        return [{"hot": 4}, {"normal": 4}, {"hot": 1, "normal": 3}][self.number - 1]


class Loader:
    """Three batches an epoch."""

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


def test_groups_are_those_of_batches_that_were_trained_on() -> None:
    feeding = source(Loader())
    for _ in feeding:
        pass
    assert [*feeding.groups.steps] == []
    feeding.trained()
    feeding.trained()
    assert [*feeding.groups.steps] == ["hot", "normal"]
    feeding.trained()
    assert [*feeding.groups.steps] == ["hot", "normal", "mixed"]
    assert feeding.groups.samples == {"hot": 5, "normal": 7}
