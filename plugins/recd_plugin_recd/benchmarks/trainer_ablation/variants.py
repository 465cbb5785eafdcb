"""The trainers that are compared: the rows of the paper's figure 9 and table 2, and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from recd_plugins.api.registry import RunConfig
from recd_plugins.api.training import Side
from recd_plugins.testing.benchmark import Size


@dataclass(frozen=True)
class Variant:
    """One trainer of a model.

    Attributes:
        name: what reports call it.
        layout: the table that it reads: a cut by time of a steady stream, or by session.
        side: with the plugins, or stock TorchRec on plain KeyedJaggedTensors.
        pool_rows: what poolings see: unique rows, or all rows by the jagged index select.
        batch: multiple of the model's batch size.
        dim: multiple of the model's embedding dim.
        sharders: the side's; on the baseline's side also stock ones with TorchRec's own
            deduplication of ids in EmbeddingCollections, or the plugins'.
        compiled: torch.compile of interaction and MLPs.
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
        """The registry of this trainer, from that of the model."""
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
                # Rates at which a model learns amplify rounding too; here losses are compared.
                "learning_rate": 0.1,
                "dense_learning_rate": 0.01,
            }
        )


BASELINE = Variant("baseline", layout="stream", side="baseline")
CLUSTERED = Variant("+clustered table", side="baseline")
DEDUP_EMB = Variant("+dedup EMB and jagged index select", pool_rows="all")
DEDUP = Variant("+dedup compute")
BATCH_2X = Variant("2x batch", batch=2)
BATCH_3X = Variant("3x batch", batch=3)
DIM_2X = Variant("2x embedding dim", dim=2)
INDEX_DEDUP = Variant("TorchRec's index dedup", side="baseline", sharders="index_dedup")
#: Nothing is deduplicated; what the sharders' kernels for CPU gain is here.
PLUGIN_SHARDERS = Variant("plain, plugins' sharders", side="baseline", sharders="plugins")
COMPILED_CLUSTERED = replace(CLUSTERED, name="+clustered table, compiled", compiled=True)
COMPILED_DEDUP = replace(DEDUP, name="+dedup compute, compiled", compiled=True)

#: Trained on the same samples from the same weights.
SAME_SAMPLES = (
    CLUSTERED,
    PLUGIN_SHARDERS,
    DEDUP_EMB,
    DEDUP,
    INDEX_DEDUP,
    COMPILED_CLUSTERED,
    COMPILED_DEDUP,
)
#: Stock trainers at the same batch.
BASELINES = (BASELINE, CLUSTERED, INDEX_DEDUP, COMPILED_CLUSTERED)


def variants(size: Size) -> tuple[Variant, ...]:
    """What is measured; compiling takes too long for a small run."""
    chosen = (
        BASELINE,
        CLUSTERED,
        PLUGIN_SHARDERS,
        DEDUP_EMB,
        DEDUP,
        BATCH_2X,
        BATCH_3X,
        DIM_2X,
        INDEX_DEDUP,
        COMPILED_CLUSTERED,
        COMPILED_DEDUP,
    )
    return chosen if size == "reference" else tuple(v for v in chosen if not v.compiled)


def largest_batch(memory: Mapping[int, float], limit: float) -> int:
    """The largest multiple of the batch size whose memory stays within ``limit``; 1 if none does.

    Args:
        memory: bytes by multiple.
        limit: bytes.
    """
    return max((multiple for multiple, used in memory.items() if used <= limit), default=1)
