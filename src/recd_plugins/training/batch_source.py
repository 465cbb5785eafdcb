"""Feeds a pipeline that reads ahead, and knows how far training came, not reading."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from recd_plugins.data.loader import DataLoader
from recd_plugins.training.checkpoint import Progress
from recd_plugins.training.group_report import GroupCount
from recd_plugins.values.batch import ModelInput


class BatchSource:
    """Batches of one run: epoch after epoch from a starting point, up to a number of steps.

    A pipeline takes batches before it trains on them. A checkpoint must hold the position of the
    last batch that was *trained* on, so positions wait here until ``trained`` is called.

    Args:
        loader: at the position of ``start``.
        start: where the run begins; the first step without.
        epochs: passes over the data, those before ``start`` counted in.
        steps: stop at this step, those before ``start`` counted in; None for no such limit.

    Attributes:
        groups: of the batches that were trained on.
    """

    def __init__(
        self,
        loader: DataLoader,
        start: Progress | None = None,
        epochs: int = 1,
        steps: int | None = None,
    ) -> None:
        self._loader = loader
        self._start = start or Progress()
        self._epochs = epochs
        self._steps = steps
        self._waiting: deque[tuple[Progress, Mapping[str, int]]] = deque()
        self.groups = GroupCount()

    @property
    def expected_steps(self) -> int:
        """The step at which the run ends, told before its first batch.

        Where the number of ranks has changed, an estimate for datasets that cannot say what is left
        of an epoch.
        """
        left = self._loader.num_left()
        if left is None:
            whole = self._epochs * len(self._loader)
        else:
            left += (self._epochs - self._start.epoch - 1) * len(self._loader)
            whole = self._start.step + max(0, left)
        return whole if self._steps is None else min(whole, self._steps)

    @property
    def limit(self) -> str:
        """What ends the run, in words."""
        epochs = f"training.epochs is {self._epochs}"
        return epochs if self._steps is None else f"training.steps is {self._steps}, {epochs}"

    def __iter__(self) -> Iterator[ModelInput]:
        step = self._start.step
        for epoch in range(self._start.epoch, self._epochs):
            for batch in self._loader:
                if self._steps is not None and step >= self._steps:
                    return
                step += 1
                progress = Progress(step, epoch, self._loader.state_dict())
                self._waiting.append((progress, batch.groups))
                yield batch

    def trained(self) -> Progress:
        """The oldest batch that was handed out is trained on; where the run stands now."""
        progress, groups = self._waiting.popleft()
        self.groups.add(groups)
        return progress
