"""TorchRec's train pipelines and metrics as plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from recd_plugins.api import Metric, Pipeline, PluginOptions, ScoredBatch, TrainPipeline

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torchrec.metrics.rec_metric import RecMetric


class Base(Pipeline):
    """TrainPipelineBase of TorchRec: copies the next batch to the device during a step."""

    name = "torchrec.base"

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """Return a TrainPipelineBase that accepts a new data iterator at any time."""
        from torchrec.distributed.train_pipeline import TrainPipelineBase

        class BasePipeline(TrainPipelineBase):
            _iterator: Iterator[Any] | None = None

            def progress(self, dataloader_iter: Iterator[Any]) -> Any:
                if dataloader_iter is not self._iterator:
                    self._iterator = dataloader_iter
                    self.reset()
                return super().progress(dataloader_iter)

        return BasePipeline(model, optimizer, device)


class SparseDist(Pipeline):
    """TrainPipelineSparseDist of TorchRec: sends the ids of the next batch during a step."""

    name = "torchrec.sparse_dist"

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        pipeline: TrainPipeline = TrainPipelineSparseDist(
            model, optimizer, device, execute_all_batches=True
        )
        return pipeline


# Metrics that keep only sums, which can be added over ranks.
_CLASSES = {
    "calibration": "CalibrationMetric",
    "ctr": "CTRMetric",
    "ne": "NEMetric",
    "mse": "MSEMetric",
    "mae": "MAEMetric",
    "nmse": "NMSEMetric",
    "accuracy": "AccuracyMetric",
    "precision": "PrecisionMetric",
    "recall": "RecallMetric",
}
_TASK = "label"


class RecMetrics(Metric):
    """Computes metrics of torchrec.metrics, such as calibration, over a whole split."""

    name = "torchrec.rec_metrics"

    class Options(PluginOptions):
        names: list[
            Literal[
                "calibration",
                "ctr",
                "ne",
                "mse",
                "mae",
                "nmse",
                "accuracy",
                "precision",
                "recall",
            ]
        ] = Field(
            default=["calibration"],
            min_length=1,
            description="Names of metric modules in torchrec.metrics.",
        )

    options: Options

    def start(self) -> dict[str, dict[str, Tensor]]:
        """Return the initial state: a dict from metric name to an empty dict of sums."""
        return {name: {} for name in self.options.names}

    def update(
        self, state: dict[str, dict[str, Tensor]], batch: ScoredBatch
    ) -> dict[str, dict[str, Tensor]]:
        """Add a batch to the sums of each metric, and return the state."""
        labels = batch.labels.double()
        for name, sums in state.items():
            metric = _made(name)
            metric.update(
                predictions={_TASK: batch.predictions},
                labels={_TASK: labels},
                weights={_TASK: labels.new_ones(len(labels))},
            )
            for key, value in metric.state_dict().items():
                sums[key] = sums[key] + value if key in sums else value
        return state

    def results(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, float]:
        """Return a dict from TorchRec's metric name to the value over all batches."""
        found = {}
        for name in self.options.names:
            seen = [state[name] for state in states if state[name]]
            metric = _made(name)
            metric.load_state_dict({key: sum(sums[key] for sums in seen) for key in seen[0]})
            for key, value in metric.local_compute().items():
                _, lifetime, shown = key.partition("|local_lifetime_")
                if lifetime:
                    found[shown] = float(value)
        return found


def _made(name: str) -> RecMetric:
    from torchrec.metrics.metrics_config import RecTaskInfo
    from torchrec.metrics.rec_metric import RecComputeMode

    cls: Any = getattr(import_module(f"torchrec.metrics.{name}"), _CLASSES[name])
    return cls(
        world_size=1,
        my_rank=0,
        batch_size=1,
        tasks=[RecTaskInfo(name=_TASK, label_name=_TASK, prediction_name=_TASK)],
        compute_mode=RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size=1,
    )
