"""One variant on this rank: a sharded model, its pipeline and batches that were made beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder

from recd_plugin_recd.benchmarks.trainer_ablation.pooling_time import POOLING_RANGE, pooling_shares
from recd_plugin_recd.benchmarks.trainer_ablation.variants import Variant
from recd_plugins.api import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    RecdError,
)
from recd_plugins.api.distributed import CollectiveBytes, fused_params, lookup_ids
from recd_plugins.api.model import DLRM, SequencePooling
from recd_plugins.api.planning import Stage
from recd_plugins.api.registry import RunConfig, TrainingSpec
from recd_plugins.api.training import StepProfile, assemble, static_bytes


class OneTrainer:
    """Trains one variant step by step.

    The batches are read, converted and lowered at the start and go round: readers are another tier.

    Args:
        registry: of the model; the variant changes it.
        variant: what is trained.
        device: of this rank.
        num_batches: how many go round.

    Attributes:
        profiled: what ``profile`` saw.
        pooling_shares: likewise, sequence pooling's share of the stages ``gemm`` and ``other``.
    """

    def __init__(
        self, registry: RunConfig, variant: Variant, device: torch.device, num_batches: int
    ) -> None:
        registry = variant.apply(registry)
        parts = assemble(
            registry, variant.side, device, sharders=_sharders(variant, registry.training)
        )
        self.batch_size = registry.training.batch_size
        self.dmp, self.optimizer = parts.dmp, parts.optimizer
        loader = parts.prepared.dataloader(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=device
        )
        self.batches = list(islice(loader, max(2, num_batches // variant.batch)))
        if len(self.batches) < 2:
            raise RecdError(f"{registry.path}: {len(self.batches)} batch(es) a rank, 2 are needed")
        assert registry.model is not None, "it was assembled"
        # Forward and backward, float32.
        self._vector_bytes = 2 * 4 * registry.model.embedding_dim
        self._device = device
        self._around: Iterator[Any] = cycle(self.batches)
        self._pipeline = parts.prepared.train_pipeline(self.dmp, self.optimizer, device)
        self._losses: list[Tensor] = []
        self.profiled = StepProfile(device, warmup=0)
        self.pooling_shares: list[dict[Stage, float]] = []
        self.dmp.train()
        (model,) = (module for module in self.dmp.modules() if isinstance(module, DLRM))
        if variant.compiled:
            # Not sequence pooling: it cuts rows into buckets as their lengths come, so that nearly
            # every batch would be compiled anew. Not the whole top either: TorchRec's outputs are
            # awaited in it, by what cannot be compiled.
            for module in (model.top.dense_arch, model.top.interaction, model.top.over_arch):
                if module is not None:
                    module.compile()
        if model.sequence_pooling is not None:
            _mark(model.sequence_pooling)

    def step(self) -> None:
        """One step."""
        loss, _, _ = self._pipeline.progress(self._around)
        self._losses.append(loss)

    def steps(self, count: int) -> None:
        """Do so many steps, which are done when this returns."""
        for _ in range(count):
            self.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes sent by kind of collective and ids looked up by feature, a step of this rank.

        The mean of one round of all batches, which read ahead or not are the same.
        """
        with CollectiveBytes() as sent, lookup_ids(self.dmp) as ids:
            self.steps(len(self.batches))
        return (
            {kind: num / len(self.batches) for kind, num in sent.by_kind().items()},
            {feature: num / len(self.batches) for feature, num in ids.per_feature.items()},
        )

    def sent_bytes(self) -> float:
        """What the features make this rank send in a step where each table is on one rank.

        Ids and lengths there, embeddings of the rows that travel back and their gradients there,
        to all ranks but itself.
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
        """One step that warms up, one timed, two profiled."""
        self.steps(1)
        for _ in range(2):
            with self.profiled.step():
                self.step()
        self.pooling_shares.append(pooling_shares(lambda: self.steps(1), self._device))

    def static_bytes(self) -> int:
        """What stays on this rank from step to step."""
        return static_bytes(self.dmp, self.optimizer)

    def losses(self) -> list[float]:
        """Losses by step, the mean over ranks. A collective call."""
        stacked = torch.stack(self._losses).double().cpu()
        dist.all_reduce(stacked)
        return (stacked / dist.get_world_size()).tolist()


def _sharders(variant: Variant, training: TrainingSpec) -> list[ModuleSharder[nn.Module]] | None:
    """None for those of the variant's side.

    TorchRec can deduplicate the ids of each feature in an EmbeddingCollection; its
    EmbeddingBagCollection has no such option.
    """
    params = fused_params(training)
    if variant.sharders == "side":
        return None
    if variant.sharders == "plugins":
        return [
            ExactEmbeddingBagCollectionSharder(dict(params)),
            ExactEmbeddingCollectionSharder(dict(params)),
        ]
    return [
        EmbeddingBagCollectionSharder(dict(params)),
        EmbeddingCollectionSharder(dict(params), use_index_dedup=True),
    ]


def _mark(pooling: SequencePooling) -> None:
    """Have the profiler see where sequence pooling begins and ends."""
    forward = pooling.forward

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        with record_function(POOLING_RANGE):
            return forward(*args, **kwargs)

    pooling.forward = marked  # type: ignore[method-assign]
