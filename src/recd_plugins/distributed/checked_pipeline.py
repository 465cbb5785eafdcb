"""TorchRec's pipelined training loop, which checks that it is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward, PipelinedForward

from recd_plugins.distributed.table_report import outermost_sharded
from recd_plugins.errors import RecdError


class CheckedTrainPipeline(TrainPipelineSparseDist):
    """A TrainPipelineSparseDist in which every sharded module is pipelined, or it raises.

    TorchRec only warns when a module cannot be pipelined, and goes on slowly.
    """

    _pipelined_forward_type: type[BaseForward[Any]] = PipelinedForward

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, **arguments: Any
    ) -> None:
        super().__init__(model, optimizer, device, **arguments)
        if device.type == "cpu":
            # TorchRec (1.6 to 1.9) enters CUDA streams there, which starts CUDA beside a GPU.
            self._stream_context = nullcontext
            forward = self._pipelined_forward_type
            self._pipelined_forward_type = type(
                forward.__name__, (forward,), {"_use_main_stream_for_dist_init": True}
            )

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch; the first call checks what is pipelined.

        Raises:
            RecdError: an embedding module is not pipelined, with the usual cause.
            StopIteration: no batch is left.
        """
        first = not self._checked
        self._checked = True
        output = self._progress(dataloader_iter)
        if first:
            self._check()
        return output

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """As the base class; batches in flight keep the ids that came for them.

        TorchRec (1.6 to 1.9) sends the ids of the first batch again and waits for none of them,
        so that its module does not know the batch sizes of the other ranks.
        """
        super().attach(model, sparse_dist and not self._pipelined_modules)

    _checked = False

    def _progress(self, dataloader_iter: Iterator[Any]) -> Any:
        return super().progress(dataloader_iter)

    def _check(self) -> None:
        # _pipelined_modules (torchrec 1.6 to 1.9): there is no public way to ask.
        pipelined = {id(module) for module in self._pipelined_modules}
        lost = [
            name for name, module in outermost_sharded(self._model) if id(module) not in pipelined
        ]
        if lost:
            raise RecdError(
                f"not pipelined: {', '.join(lost)}. An embedding module has to take its input "
                "straight from the batch, as an attribute or an item of it; move what changes the "
                "input in between into the data loader"
            )
