"""``torchrec.base`` and ``torchrec.sparse_dist``: TorchRec's pipelines as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.api import Pipeline, TrainPipeline

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


class Base(Pipeline):
    """One batch after the other: only the copy to the device overlaps (TrainPipelineBase)."""

    name = "torchrec.base"

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """TorchRec's, which begins anew with another iterator."""
        from recd_plugin_torchrec.base_pipeline import BasePipeline

        return BasePipeline(model, optimizer, device)


class SparseDist(Pipeline):
    """The input dist of the next batch overlaps as well (TrainPipelineSparseDist)."""

    name = "torchrec.sparse_dist"

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """TorchRec's, which trains all batches, those at the end too."""
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        pipeline: TrainPipeline = TrainPipelineSparseDist(
            model, optimizer, device, execute_all_batches=True
        )
        return pipeline
