"""Training loops that a trainer may have: TorchRec's pipelines, and a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        build: makes a pipeline of model and optimizer; None of a plain loop.
        trains: whether it does.
        truth: whether it trains as a plain loop does.
        on_cuda: whether TorchRec's code wants streams of CUDA.
    """

    build: Callable[[nn.Module, Optimizer], Any] | None = None
    trains: bool = True
    truth: bool = True
    on_cuda: bool = False


# They record tensors on streams, which are None on CPU (torchrec 1.8).
_ON_CUDA = {
    "EvalPipelineFusedSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
}


class _Staged:
    """A StagedTrainPipeline, which leaves forward and backward to its user."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        util: Any = SparseDataDistUtil(model, None)  # type: ignore[arg-type]
        stage = PipelineStage(
            "input dist",
            util.start_sparse_data_dist,
            None,  # type: ignore[arg-type]
            fill_callback=util.wait_sdd_fill_callback,
        )
        self._pipeline: Any = train_pipelines.StagedTrainPipeline([stage])

    def progress(self, batches: Iterator[Any]) -> Any:
        batch = self._pipeline.progress(batches)
        if batch is None:
            raise StopIteration
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output


def _of(name: str, **arguments: Any) -> Callable[[nn.Module, Optimizer], Any]:
    kind = getattr(train_pipelines, name)

    def build(model: nn.Module, optimizer: Optimizer) -> Any:
        return kind(model, optimizer, CPU, **arguments)

    return build


def _all() -> dict[str, Loop]:
    loops = {"a plain loop": Loop()}
    of_library = [
        name
        for name, kind in vars(train_pipelines).items()
        if isinstance(kind, type) and issubclass(kind, train_pipelines.TrainPipeline)
    ]
    for name in sorted(of_library):
        if name == "TrainPipeline":  # abstract
            continue
        if name == "StagedTrainPipeline":
            loops[name] = Loop(_Staged, on_cuda=True)
        elif name.startswith("Eval"):
            loops[name] = Loop(_of(name), trains=False, on_cuda=name in _ON_CUDA)
        elif name == "TrainPipelineSemiSync":
            loops[name] = Loop(_of(name), truth=False, on_cuda=True)
        elif name == "TrainPipelinePT2":
            configs = train_pipelines.TorchCompileConfig(backend="eager", fullgraph=False)
            loops[name] = Loop(_of(name, compile_configs=configs))
        else:
            loops[name] = Loop(_of(name), on_cuda=name in _ON_CUDA)
    return loops


PIPELINES: dict[str, Loop] = _all()
