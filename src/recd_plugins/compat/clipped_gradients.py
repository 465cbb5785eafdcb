"""Tables whose kernels clip gradients: FBGEMM's ``gradient_clipping``.

FBGEMM clips the gradient of each row that is looked up. Rows that are looked up once get the sum of
their gradients, and a clipped sum is not the sum of what is clipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.text import shortened

_OPTION = "gradient_clipping"


class ClippedGradients:
    """The tables of a module that clip.

    Args:
        module: not sharded, with the optimizers that its parameters bring.
        params: how each of its tables is sharded.
        fused_params: of its sharder.
        coalesced: tables whose ids are sent once.

    Attributes:
        in_use: whether any module of this process has such tables; models are not searched else.

    Raises:
        SetupError: a coalesced table clips.
    """

    in_use: ClassVar[bool] = False

    def __init__(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
        coalesced: Collection[str] = (),
    ) -> None:
        pooled = isinstance(module, EmbeddingBagCollection)
        configs: Any = module.embedding_bag_configs() if pooled else module.embedding_configs()
        tables: Any = module.embedding_bags if pooled else module.embeddings
        clipped = []
        for config in configs:
            given = dict(fused_params or {})
            # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
            for arguments in getattr(tables[config.name].weight, "_optimizer_kwargs", []):
                given |= arguments
            dense = params[config.name].compute_kernel == EmbeddingComputeKernel.DENSE.value
            if clips(given) and not dense:
                clipped.append(config)
        self.tables = tuple(config.name for config in clipped)
        self._features = frozenset(name for config in clipped for name in config.feature_names)
        ClippedGradients.in_use |= bool(clipped)
        if both := [name for name in self.tables if name in coalesced]:
            raise SetupError(
                f"tables {shortened(both)} are to be coalesced and have {_OPTION}, which clips the "
                "gradient of each row that is looked up: of ids that are sent once it would clip "
                "their sums. Leave one of the two out"
            )

    @property
    def why_plain(self) -> str:
        """Why batches of bags have to be plain; empty if they need not be."""
        if not self.tables:
            return ""
        return f"as {_OPTION} of tables {shortened(self.tables)} clips the gradient of each row"

    def check_stored(self, features: Collection[str]) -> None:
        """Refuse features whose equal rows are looked up and pooled once.

        Raises:
            ExactnessError: tables that clip have some; names them.
        """
        if clipped := sorted(self._features.intersection(features)):
            raise ExactnessError(
                f"features {shortened(clipped)} are deduplicated, and their tables "
                f"{shortened(self.tables)} have {_OPTION}, which clips the gradient of each row "
                "that is looked up: of rows that are stored once it would clip their sums. Leave "
                "these features out of the converter or of dedup, or clipping out of the optimizer"
            )


def why_clipped(sharded: nn.Module) -> str:
    """Return why a module around an EmbeddingBagCollection needs plain batches, or nothing."""
    return next(filter(None, (clipped.why_plain for clipped in _inside(sharded))), "")


def check_deduplicated(model: nn.Module, batch: ModelInput) -> None:
    """Refuse a batch with deduplicated sequences of tables that clip."""
    if ClippedGradients.in_use:
        for clipped in _inside(model):
            clipped.check_stored({*batch.inverse_lookup, *batch.segments})


def clips(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments of a kernel have it clip gradients."""
    return bool(arguments.get(_OPTION))


def _inside(model: nn.Module) -> Iterator[ClippedGradients]:
    for module in model.modules():
        if isinstance(clipped := getattr(module, "clipped", None), ClippedGradients):
            yield clipped
