"""TorchRec's pipelined training loop, with a lost overlap as an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from recd_plugins.distributed import check_every_parameter_is_trained
from recd_plugins.errors import RecdError


class CheckedTrainPipeline(TrainPipelineSparseDist):
    """A TrainPipelineSparseDist in which every sharded module is pipelined, or it raises.

    TorchRec only warns when a module cannot be pipelined, and goes on slowly.
    """

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train one batch; the first call checks what is pipelined.

        Raises:
            RecdError: an embedding module is not pipelined, with the usual cause.
            StopIteration: no batch is left.
        """
        first = not self._checked
        self._checked = True
        output = super().progress(dataloader_iter)
        if first:
            self._check()
        return output

    _checked = False

    def _check(self) -> None:
        # _pipelined_modules (torchrec 1.6 to 1.9): there is no public way to ask.
        pipelined = {id(module) for module in self._pipelined_modules}
        lost = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, ShardedModule) and id(module) not in pipelined
        ]
        if lost:
            raise RecdError(
                f"not pipelined: {', '.join(lost)}. An embedding module has to take its input "
                "straight from the batch, as an attribute or an item of it; move what changes the "
                "input in between into the data loader"
            )


def build_train_pipeline(
    dmp: nn.Module, optimizer: Optimizer, device: torch.device
) -> CheckedTrainPipeline:
    """A pipeline over ``dmp`` that overlaps input dist and device copies with compute.

    Raises:
        ExactnessError: there are parameters that neither the backward pass nor ``optimizer``
            updates.
    """
    check_every_parameter_is_trained(dmp, optimizer)
    return CheckedTrainPipeline(dmp, optimizer, device, execute_all_batches=True)
