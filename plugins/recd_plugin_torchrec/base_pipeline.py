"""TorchRec's TrainPipelineBase over one iterator after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrec.distributed.train_pipeline import TrainPipelineBase


class BasePipeline(TrainPipelineBase):
    """A TrainPipelineBase that takes one iterator after the other, which TorchRec's does not."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """See TorchRec."""
        if dataloader_iter is not self._iterator:
            self._iterator = dataloader_iter
            self.reset()
        return super().progress(dataloader_iter)

    _iterator: Iterator[Any] | None = None
