"""Loads trained models, sharded on ranks or unsharded in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recd_plugins.config import RunConfig, at_entry
from recd_plugins.config.device import choose_device, device_of_rank
from recd_plugins.config.run_config import NoDataset
from recd_plugins.data.loader import pinned
from recd_plugins.data.prepared import wrapped_dataset
from recd_plugins.data.preprocess import fitted_steps
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.interfaces import Dataset, FeatureSchema
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.build import build_model
from recd_plugins.model.deferred_tables import collections_made_by
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.planning.choosing import prepare
from recd_plugins.planning.prepared import Prepared, rewritten
from recd_plugins.planning.topologies import MACHINE
from recd_plugins.runtime import activity
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.runtime.launch import (
    backend_for,
    join_torchrun,
    launch,
    torchrun_rank,
    torchrun_ranks_per_node,
)
from recd_plugins.runtime.rank_agreement import check_started_alike, from_rank_0, together
from recd_plugins.runtime.watch import HangLimits, watched_by_each_other
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_dcp import load_weights, read_weights
from recd_plugins.training.checkpoint_files import check_whole
from recd_plugins.training.evaluation import Measured, evaluate, steps
from recd_plugins.training.finite import FiniteRun
from recd_plugins.training.identity import check_scores, load_fitted, read_kinds, read_schema
from recd_plugins.training.sharded_model import ShardedModel, build_sharded_model
from recd_plugins.training.trainer import Job

J = TypeVar("J", bound="TrainedJob")
R = TypeVar("R", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True)
class TrainedJob(Job):
    """Describes a trained model to load. It is pickled and sent to ranks."""

    checkpoint: Path = Path()

    def prepare(self) -> None:
        """Prepare missing data in one process, before all ranks read it."""
        wrapped_dataset(self.load()).prepare()

    def planned_by(self, registry: RunConfig) -> RunConfig:
        """Return the run config whose data determines how tables are placed on ranks."""
        return registry


@dataclass(frozen=True)
class Trained:
    """A sharded model with the weights of a checkpoint, ready to score.

    ``registry`` has the sharding entries that a chooser selected on this machine. ``same_data`` is
    True if the dataset is the training data.
    """

    parts: ShardedModel
    registry: RunConfig
    device: torch.device
    step: int
    same_data: bool
    checkpoint: Path

    def logits(self, batches: Iterator[ModelInput]) -> Iterator[Tensor]:
        """Yield the logits of each batch of this rank, float32 ``[B]``.

        Reads some batches ahead. All ranks must call this, with the same number of batches.
        """
        parts = self.parts
        registry = parts.prepared.registry
        taken = map(pinned, batches) if self.device.type == "cuda" else batches
        pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, self.device)
        for _, logits, _ in steps(pipeline, taken, registry, parts.dmp.module):
            yield logits

    def evaluate(self, rank: int, world_size: int) -> Measured:
        """Return quality and metrics over all rows of the test split. All ranks must call this."""
        parts, finite = self.parts, FiniteRun(str(self.checkpoint))
        pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, self.device)
        return evaluate(parts.prepared, parts.dmp, pipeline, rank, world_size, self.device, finite)


def load_trained(job: TrainedJob) -> Trained:
    """Build the sharded model of a run config and load a checkpoint. All ranks must call this."""
    activity.start()
    silence_upstream()
    registry = job.load()
    if registry.training.workers:
        from recd_plugins.data.workers import start_server

        start_server()
    device = device_of_rank(job.device)
    load_fitted(registry, job.checkpoint)
    planned = job.planned_by(registry)
    # Nothing is trained, and FBGEMM may support a table's optimizer only on another device.
    planned = replace(planned, further={**planned.further, "optimizer": ()})
    parts = build_sharded_model(planned, "plugins", device)
    fit_converter(parts.prepared.registry)
    # The data used here to place tables does not change the model.
    registry = replace(
        parts.prepared.registry, dataset=registry.dataset, wrappers=registry.wrappers
    )
    fitted_steps(registry, registry.dataset.schema())
    same_data, *_ = together(
        lambda: (
            check_scores(job.checkpoint, registry, parts.tables) if dist.get_rank() == 0 else True
        )
    )
    checkpoints = Checkpoints(job.checkpoint.parent, keep=1)
    progress = checkpoints.load_one(job.checkpoint, parts.dmp)
    parts.dmp.eval()
    return Trained(parts, registry, device, progress.step, same_data, job.checkpoint)


def on_ranks(
    registry: RunConfig,
    function: Callable[[int, int, J], T],
    job: J,
    alike: Mapping[str, Any] | None = None,
) -> T:
    """Call ``function(rank, world_size, job)`` in new processes, or on the ranks of torchrun.

    Ranks of torchrun use rank 0's checkpoint, because each rank could find another newest
    checkpoint. The options in ``alike`` must be equal on all ranks.

    Returns:
        The result of rank 0; under torchrun, the result of this rank.
    """
    training = registry.training
    device = choose_device(registry)
    backend = backend_for(device)
    if torchrun_rank() is None:
        job.prepare()
        ranks_per_node = training.ranks_per_node or training.ranks
        return launch(
            function, training.ranks, job, backend=backend, local_world_size=ranks_per_node
        )[0]
    torchrun_ranks_per_node()  # refused before ranks wait for each other
    # No timeout, because the time to write a table is unknown.
    limits = HangLimits(training.hang_notice, None, lambda: "Run the command again")
    with (
        join_torchrun(backend) as (rank, world_size),
        watched_by_each_other(rank, world_size, limits),
    ):
        check_started_alike(device, alike or {})
        job = replace(job, checkpoint=from_rank_0(job.checkpoint))

        def prepare_data() -> None:
            if rank == 0:
                with doing("preparing the data"):
                    job.prepare()

        together(prepare_data)
        return function(rank, world_size, job)


def whole_model(registry: RunConfig, checkpoint: Path) -> Prepared:
    """Return an unsharded trained model with its sequence poolings and preprocessing.

    Prints a note on stderr if the data is not the training data.
    """
    whole = _as_fitted(registry, checkpoint)
    prepared = prepare(whole, build_model(whole, whole.dataset.schema()))  # with poolings
    if not _fill(prepared.model, registry, checkpoint):
        say_other_data(checkpoint)
    return prepared


def unchecked_model(registry: RunConfig, checkpoint: Path) -> nn.Module:
    """Return an unsharded trained model that does not validate its input, for tracing."""
    model = _unsharded(_as_fitted(registry, checkpoint))
    _fill(model, registry, checkpoint)
    return model


def _unsharded(whole: RunConfig) -> nn.Module:
    model = build_model(whole, whole.dataset.schema())
    if whole.sharding:
        model = rewritten(whole, model)
    put_poolings(whole, model)
    return model


def ids_of_rows(registry: RunConfig, checkpoint: Path, table: str) -> Tensor | None:
    """Return ``Sharding.ids_of_rows`` of a table; None if the ids of the table are its rows."""

    def read(ending: str) -> Tensor:
        (found,) = read_weights(checkpoint, lambda name: name.endswith(ending)).values()
        return found

    for entry in registry.sharding:
        if entry.plugin.maps_ids and entry.matches(table):
            with at_entry(registry.path, entry), plugin_call(entry.plugin, "ids_of_rows"):
                return entry.plugin.ids_of_rows(table, read)
    return None


def empty_model(registry: RunConfig) -> nn.Module:
    """Return the unsharded model of a run with fitted preprocessing, for tracing.

    Its tables need no memory. All their elements are one zero.
    """
    with collections_made_by(_on_meta):
        model = _unsharded(_whole(registry))
    for each in embedding_modules(model):
        for module in each.shardable.modules():
            for name, weight in module.named_parameters(recurse=False):
                zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


def _on_meta(
    _: type[nn.Module], init: Callable[..., None], module: nn.Module, *args: Any, **options: Any
) -> None:
    bound = inspect.signature(init).bind(module, *args, **options)
    bound.arguments["device"] = torch.device("meta")
    init(*bound.args, **bound.kwargs)


def say_other_data(checkpoint: Path) -> None:
    """Print that the dataset is not the training data of a checkpoint."""
    click.echo(
        f"The dataset is not the training data of {checkpoint}, so the test split may contain "
        "training rows",
        err=True,
    )


def _as_fitted(registry: RunConfig, checkpoint: Path) -> RunConfig:
    check_whole(checkpoint)
    load_fitted(registry, checkpoint)
    fitted_steps(registry, registry.dataset.schema())
    return _whole(registry)


def _whole(registry: RunConfig) -> RunConfig:
    """Return the run config without sharding, except for plugins that map ids."""
    # Nothing is sharded here, so the topology does not matter.
    whole = registry.with_training({"topology": MACHINE})
    mapping = tuple(each for each in whole.sharding if each.plugin.maps_ids)
    return replace(whole, sharding=mapping, cache=())


def _fill(model: nn.Module, registry: RunConfig, checkpoint: Path) -> bool:
    """Load a checkpoint's weights; return True if the dataset is its training data."""
    same_data = check_scores(checkpoint, registry, tables_of(model))
    load_weights(checkpoint, model)
    return same_data


class AbsentData(NoDataset):
    """A dataset with the columns of a checkpoint but without rows.

    ``error`` is raised when rows are needed.
    """

    def __init__(
        self,
        dataset: Dataset,
        schema: FeatureSchema,
        trained_kinds: Mapping[str, str] | None,
        error: DataError,
    ) -> None:
        super().__init__(dataset.options)
        # For the identity.
        said = {name: getattr(dataset, name) for name in ("name", "free_options", "row_options")}
        vars(self).update(said)
        self.error = error
        self.trained_kinds = trained_kinds or {}
        self._dataset, self._schema = dataset, schema

    def prepare(self) -> NoReturn:
        raise self.error

    def schema(self) -> FeatureSchema:
        return self._schema

    def identity(self) -> dict[str, Any]:
        """Return an empty identity, because the rows are unknown."""
        return {}

    def texts(self, feature: str) -> Mapping[int, str]:
        return self._dataset.texts(feature)

    def to_score(self, location: str) -> Dataset:
        self._dataset.trained_schema = self._schema
        self._dataset.trained_kinds = self.trained_kinds
        return self._dataset.to_score(location)


def with_trained_columns(registry: R, checkpoint: Path, *, rows: bool = True) -> R:
    """Return the run config with its data prepared, or with ``AbsentData`` if data is missing.

    With ``rows=False``, only the columns must be known, not the rows.
    """
    try:
        if rows:
            registry.dataset.prepare()
        registry.dataset.schema()
    except DataError as error:
        schema, kinds = read_schema(checkpoint), read_kinds(checkpoint)
        absent = AbsentData(registry.dataset, schema, kinds, error)
        return replace(registry, dataset=absent, wrappers=())
    return registry
