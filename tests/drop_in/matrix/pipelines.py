"""Training loops that a trainer may have: TorchRec's pipelines, and a plain one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed import train_pipeline
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.pipeline_context import EmbeddingTrainPipelineContext
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.types import ShardingType

from recd_plugins.testing.device import DEVICE


@dataclass(frozen=True)
class Loop:
    """A training loop; ``build`` makes a pipeline of model and optimizer, None for a plain loop."""

    build: Callable[[nn.Module, Optimizer], Any] | None = None
    trains: bool = True
    truth: bool = True  # it trains as a plain loop does
    on_cuda: bool = False  # TorchRec's code wants streams of CUDA


# They record tensors on streams, pin memory or move states to a device (torchrec 1.8).
_ON_CUDA = {
    "EvalPipelineCPUSparse",
    "EvalPipelineFusedSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePrefetchEMS",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistOptStash",
}
#: These run at one place of the backward pass, which ``site_fqn`` names.
_AT_A_PLACE = {
    "TrainPipelinePrefetchEMS",
    "TrainPipelineSparseDistBwdOpt",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistOptStash",
}
#: Values other than the default, of arguments of TrainPipelineSparseDist by name.
_VALUES: dict[str, Any] = {
    "execute_all_batches": False,
    "apply_jit": True,
    "context_type": EmbeddingTrainPipelineContext,
    "pipeline_postproc": True,
    "dmp_collection_sync_interval_batches": 2,
    "enqueue_batch_after_forward": True,
    "enable_inplace_copy_batch": True,
    "free_features_storage_early": True,
    "clear_data_dist_inputs": True,
    "async_inplace_copy": True,  # from 1.9 on
}
#: The batch of a step is read by a thread.
THREAD = "TrainPipelineBase fed by a DataLoadingThread"


class _Fed:
    """A TrainPipelineBase whose batches a DataLoadingThread reads."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._pipeline: Any = train_pipelines.TrainPipelineBase(model, optimizer, DEVICE)
        self._thread: Any = None
        self._batches: Iterator[Any] = iter(())

    def progress(self, batches: Iterator[Any]) -> Any:
        if self._thread is None:
            self._thread = train_pipeline.DataLoadingThread(DEVICE, batches, True)
            self._thread.start()
            self._batches = iter(self._thread.get_next_batch, None)
        return self._pipeline.progress(self._batches)

    def detach(self) -> None:
        self._thread.stop()


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


def of_library() -> dict[str, type]:
    found: dict[str, type] = {}
    for each in pkgutil.iter_modules(train_pipeline.__path__, f"{train_pipeline.__name__}."):
        for name, kind in vars(importlib.import_module(each.name)).items():
            if isinstance(kind, type) and issubclass(kind, train_pipelines.TrainPipeline):
                found[name] = kind
    del found["TrainPipeline"]  # abstract
    return dict(sorted(found.items()))


def arguments_of(kind: type) -> list[str]:
    """Return the arguments of a pipeline besides model, optimizer and device."""
    return list(inspect.signature(kind).parameters)[3:]


def with_argument(argument: str) -> str:
    return f"TrainPipelineSparseDist {argument}"


def _own_forward(model: nn.Module, optimizer: Optimizer) -> Any:
    return train_pipelines.TrainPipelineSparseDist(
        model, optimizer, DEVICE, custom_model_fwd=lambda batch: model(batch)
    )


def _of(name: str, kind: Any, **arguments: Any) -> Callable[[nn.Module, Optimizer], Any]:
    def build(model: Any, optimizer: Optimizer) -> Any:
        at = dict(arguments)
        if name in _AT_A_PLACE:
            at["site_fqn"] = "sparse"
        if "sharding_type" in inspect.signature(kind).parameters:
            (sharding,) = {each.sharding_type for each in model.plan.plan["sparse"].values()}
            at["sharding_type"] = ShardingType(sharding)
        return kind(model, optimizer, DEVICE, **at)

    return build


def _all() -> dict[str, Loop]:
    loops = {"a plain loop": Loop(), THREAD: Loop(_Fed)}
    for name, kind in of_library().items():
        on_cuda = name in _ON_CUDA
        if name == "StagedTrainPipeline":
            loops[name] = Loop(_Staged, on_cuda=True)
        elif name.startswith("Eval"):
            loops[name] = Loop(_of(name, kind), trains=False, on_cuda=on_cuda)
        elif name == "TrainPipelineSemiSync":
            loops[name] = Loop(_of(name, kind), truth=False, on_cuda=True)
        elif name == "TrainPipelinePT2":
            configs = train_pipelines.TorchCompileConfig(backend="eager", fullgraph=False)
            loops[name] = Loop(_of(name, kind, compile_configs=configs))
        else:
            loops[name] = Loop(_of(name, kind), on_cuda=on_cuda)
    kind = train_pipelines.TrainPipelineSparseDist
    loops |= {
        # Without it, what is left in the pipeline at the loader's end is not trained.
        with_argument(name): Loop(
            _of("", kind, **{name: value}), truth=name != "execute_all_batches"
        )
        for name, value in _VALUES.items()
        if name in arguments_of(kind)
    }
    loops[with_argument("custom_model_fwd")] = Loop(_own_forward)
    return loops


PIPELINES: dict[str, Loop] = _all()
