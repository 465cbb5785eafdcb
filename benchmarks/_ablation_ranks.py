"""Trains all variants of one model of the ablation benchmark on each rank, in alternating turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder

from benchmarks._measure import Device, from_every_rank
from benchmarks._ranks import RankTrainer, first_batches, freeze_objects, start_rank
from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder
from recd_plugins.config import TrainingSpec
from recd_plugins.config.from_file import load_registry
from recd_plugins.config.run_config import RunConfig
from recd_plugins.interfaces.step_cost import Stage, StageTimes, stage_of
from recd_plugins.model.dlrm import DLRM
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.training.measurement import sum_by_kind
from recd_plugins.training.sharded_model import Variant as Side
from recd_plugins.training.sharded_model import build_sharded_model
from recd_plugins.training.step_profile import (
    PROFILED_STEP,
    StepProfile,
    host_seconds,
    read_profile,
)

# Profiler range around the forward pass of sequence pooling.
_POOLING = "## sequence pooling ##"


@dataclass(frozen=True)
class Variant:
    """One variant of a model in the ablation.

    The training table is ordered by time (``stream``) or by session (``clustered``). ``baseline``
    is stock TorchRec on plain KeyedJaggedTensors. ``batch`` and ``dim`` multiply the model's batch
    size and embedding dimension. ``index_dedup`` are TorchRec's sharders with ``use_index_dedup``.
    ``compiled`` applies torch.compile to the interaction and the MLPs.
    """

    name: str
    layout: Literal["stream", "clustered"] = "clustered"
    side: Side = "plugins"
    pool_rows: Literal["unique", "all"] = "unique"
    batch: int = 1
    dim: int = 1
    sharders: Literal["side", "index_dedup", "plugins"] = "side"
    compiled: bool = False

    def apply(self, registry: RunConfig) -> RunConfig:
        """Return the registry of a model, modified for this variant."""
        assert registry.model is not None, "the models of the benchmark have a section model"
        model = registry.model.model_copy(
            update={
                "pool_rows": self.pool_rows,
                "embedding_dim": registry.model.embedding_dim * self.dim,
            }
        )
        registry = replace(registry, spec=registry.spec.model_copy(update={"model": model}))
        return registry.with_training(
            {
                "batch_size": registry.training.batch_size * self.batch,
                # Small rates: larger ones amplify rounding errors, and losses are compared.
                "learning_rate": 0.1,
                "dense_learning_rate": 0.01,
            }
        )


@dataclass(frozen=True)
class Job:
    """Job description that is pickled and sent to the ranks.

    Batches are repeated; a variant with larger batches uses fewer. One more turn, and one more step
    per turn, warm up. ``profiled`` turns follow.
    """

    registries: Mapping[str, Path]
    variants: tuple[Variant, ...]
    num_batches: int
    turns: int
    steps: int
    profiled: int
    device: Device = "cpu"


@dataclass
class Measured:
    """Measurements of one variant over all ranks.

    Attributes:
        seconds: wall time of a step, one value per turn.
        bytes_by_kind: bytes that all ranks send per step, keyed by kind of collective.
        ids: ids that all ranks look up per step, keyed by feature.
        sent: bytes that all ranks send per step if each table is on one rank, from the batches.
        stages: seconds per step of each stage, averaged over ranks.
        pooling: fraction of stages ``gemm`` and ``other`` spent in sequence pooling; CPU only.
        static_bytes: bytes of parameters and optimizer state on the rank with the most memory.
        peak_bytes, mean_bytes: memory of a step on the same rank, without ``static_bytes``.
        failure: why the variant could not be trained; None if it was trained.
    """

    batch_size: int = 0
    seconds: list[float] = field(default_factory=list)
    num_batches: int = 0
    losses: list[float] = field(default_factory=list)
    bytes_by_kind: dict[str, float] = field(default_factory=dict)
    ids: dict[str, float] = field(default_factory=dict)
    sent: float = 0
    stages: StageTimes | None = None
    pooling: dict[Stage, float] = field(default_factory=dict)
    static_bytes: float = 0
    peak_bytes: float = 0
    mean_bytes: float = 0
    failure: str | None = None


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:
    """Measure all variants of a job and return the results keyed by variant name. Collective."""
    start_rank()
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    trainers: dict[str, _Trainer] = {}
    result: dict[str, Measured] = {}
    for variant in job.variants:
        trainer, failure = _try(variant, job, device)
        result[variant.name] = Measured(failure=failure)
        if trainer is not None:
            trainers[variant.name] = trainer
    freeze_objects()
    for name, trainer in trainers.items():
        found = result[name]
        found.batch_size, found.num_batches = trainer.batch_size, len(trainer.batches)
        by_kind, ids = zip(*from_every_rank(trainer.counts()), strict=True)
        found.bytes_by_kind, found.ids = sum_by_kind(list(by_kind)), sum_by_kind(list(ids))
        found.sent = sum(from_every_rank(trainer.sent_bytes()))
    for turn in range(job.turns + 1):
        for name, trainer in trainers.items():
            spent = trainer.turn(job.steps)
            if turn:
                result[name].seconds.append(spent)
    for _ in range(job.profiled):
        for trainer in trainers.values():
            trainer.profile()
    for name, trainer in trainers.items():
        found = result[name]
        found.stages = StageTimes.mean(from_every_rank(trainer.profiled.stages()))
        shares = [share for rank in from_every_rank(trainer.pooling_shares) for share in rank]
        if shares:
            found.pooling = {
                stage: sum(s[stage] for s in shares) / len(shares) for stage in shares[0]
            }
        held = static_bytes(trainer.dmp, trainer.optimizer)
        memory = from_every_rank((held, trainer.profiled.memory()))
        found.static_bytes, of_step = max(memory, key=lambda each: each[0] + each[1].peak)
        found.peak_bytes, found.mean_bytes = of_step.peak, of_step.mean
        found.losses = trainer.losses()
    return result


def _try(variant: Variant, job: Job, device: torch.device) -> tuple[_Trainer | None, str | None]:
    """Return a trainer after its first step, or None with the reason why TorchRec cannot run it."""
    # Use a fixed sharding, so that only deduplication differs.
    registry = load_registry(job.registries[variant.layout], sharding="torchrec.planner")
    trainer = _Trainer(registry, variant, device, job.num_batches)
    try:
        trainer.steps(1)
    except NotImplementedError as error:
        if variant.sharders != "index_dedup":
            raise
        return None, str(error).partition(".")[0]
    return trainer, None


class _Trainer(RankTrainer):
    def __init__(
        self, registry: RunConfig, variant: Variant, device: torch.device, num_batches: int
    ) -> None:
        registry = variant.apply(registry)
        parts = build_sharded_model(
            registry, variant.side, device, sharders=_sharders(variant, registry.training)
        )
        self.batch_size = registry.training.batch_size
        self.dmp, self.optimizer = parts.dmp, parts.optimizer
        batches = first_batches(parts, device, max(2, num_batches // variant.batch))
        pipeline = parts.prepared.train_pipeline(self.dmp, self.optimizer, device)
        super().__init__(pipeline, batches, device)
        assert registry.model is not None, "the model was built"
        # Forward and backward, float32.
        self._vector_bytes = 2 * 4 * registry.model.embedding_dim
        self.profiled = StepProfile(device, warmup=0)
        self.pooling_shares: list[dict[Stage, float]] = []
        self.dmp.train()
        (model,) = (module for module in self.dmp.modules() if isinstance(module, DLRM))
        if variant.compiled:
            # Sequence pooling groups rows by length, so nearly every batch would recompile it.
            # The top module waits for TorchRec's outputs, so compile only its parts.
            for module in (model.top.dense_arch, model.top.interaction, model.top.over_arch):
                if module is not None:
                    module.compile()
        if model.sequence_pooling is not None:
            _mark(model.sequence_pooling)

    def counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes per kind of collective and the ids per feature of a mean step."""
        with CollectiveBytes() as sent, lookup_ids(self.dmp) as ids:
            self.steps(len(self.batches))
        return (
            {kind: num / len(self.batches) for kind, num in sent.by_kind().items()},
            {feature: num / len(self.batches) for feature, num in ids.per_feature.items()},
        )

    def sent_bytes(self) -> float:
        """Return the bytes that this rank sends per step if each table is stored on one rank.

        Counts ids, lengths, embeddings and gradients.
        """
        sent = 0
        for batch in self.batches:
            for kjt, pooled in ((batch.sparse_features, True), (batch.sequence_features, False)):
                if kjt is not None:
                    ids, lengths = kjt.values(), kjt.lengths()
                    vectors = (lengths if pooled else ids).numel()
                    sent += ids.nbytes + lengths.nbytes + vectors * self._vector_bytes
        ranks = dist.get_world_size()
        return sent * (ranks - 1) / ranks / len(self.batches)

    def profile(self) -> None:
        """Run one warm-up step and two profiled steps."""
        self.steps(1)
        for _ in range(2):
            with self.profiled.step():
                self.steps(1)
        if self._device.type == "cpu":
            self.pooling_shares.append(_pooling_shares(lambda: self.steps(1)))


def _sharders(variant: Variant, training: TrainingSpec) -> list[ModuleSharder[nn.Module]] | None:
    """Return the sharders of a variant, or None to use the defaults."""
    if variant.sharders == "side":
        return None
    bags, sequences = fused_params(training), fused_params(training)
    if variant.sharders == "plugins":
        return [
            ExactEmbeddingBagCollectionSharder(bags),
            ExactEmbeddingCollectionSharder(sequences),
        ]
    return [
        EmbeddingBagCollectionSharder(bags),
        EmbeddingCollectionSharder(sequences, use_index_dedup=True),
    ]


def _mark(pooling: SequencePooling) -> None:
    """Add a profiler range around the forward pass of sequence pooling."""
    forward = pooling.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_POOLING):
            return forward(*args, **kwargs)

    pooling.forward = marked  # type: ignore[method-assign]


def _pooling_shares(step: Callable[[], object]) -> dict[Stage, float]:
    """Return the fraction of matrix products and other operators spent in sequence pooling.

    Runs one step. Counts the forward pass of pooling and the autograd nodes that it creates.
    """
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(PROFILED_STEP):
        step()
    total = host_seconds(read_profile(profiler, torch.device("cpu")))
    results: Any = profiler.profiler
    host = [
        event
        for event in results.kineto_results.events()  # profile.events() takes seconds
        if not event.is_async() and event.name() != "[memory]"
    ]
    forward = _union(_span(e) for e in host if e.name() == _POOLING)
    made = {e.sequence_nr() for e in host if e.sequence_nr() >= 0 and _within(e, forward)}
    backward = (
        _span(e)
        for e in host
        if e.name().startswith("autograd::engine::evaluate_function") and e.sequence_nr() in made
    )
    pooling = _union([*forward, *backward])
    inside = [e for e in host if _within(e, pooling)]
    products = _union(_span(e) for e in inside if stage_of(e.name()) == "gemm")
    # Pooling also waits for embeddings; that time belongs to the all-to-all.
    staged = _union(_span(e) for e in inside if stage_of(e.name()) is not None)
    seconds: dict[Stage, float] = {
        "gemm": _length(products) / 1e9,
        "other": (_length(pooling) - _length(staged)) / 1e9,
    }
    return {
        stage: min(1.0, spent / total[stage]) if total[stage] else 0.0
        for stage, spent in seconds.items()
    }


def _span(event: Any) -> tuple[int, int]:
    return event.start_ns(), event.end_ns()


def _within(event: Any, intervals: Sequence[tuple[int, int]]) -> bool:
    """Return whether an event lies inside one of the sorted, disjoint intervals."""
    later = bisect_right(intervals, event.start_ns(), key=itemgetter(0))
    return later > 0 and bool(event.end_ns() <= intervals[later - 1][1])


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping intervals and return them sorted by start."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, buffers and optimizer state on this rank."""
    kept: list[Any] = [*optimizer.state.values()]
    for module in model.modules():
        # module.parameters() of sharded modules returns slices, and not all of the state.
        kept += [*module._parameters.values(), *module._buffers.values()]
    storages = [tensor.untyped_storage() for tensor in _local_tensors(kept)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _local_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _local_tensors(each)
    elif isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, Tensor):
        yield value.detach()
