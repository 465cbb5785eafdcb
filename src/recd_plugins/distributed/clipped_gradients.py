"""Tables whose kernels clip gradients: FBGEMM's ``gradient_clipping`` and ``max_gradient``.

They clip what comes for each row of their output, number by number, before rows of the table learn
by it. Of equal rows that are looked up once there comes the sum, and a sum that is clipped is not
the sum of what is clipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.errors import ExactnessError, SetupError
from recd_plugins.values.batch import ModelInput
from recd_plugins.words import shortened

_OPTION = "gradient_clipping"


class ClippedGradients:
    """Those tables of a module.

    Args:
        module: not sharded.
        params: how each of its tables is sharded.
        fused_params: of its sharder.

    Attributes:
        tables: names of those that clip.
        features: that they look up.
        in_use: whether any module of this process has such tables: models are not searched else.
    """

    in_use: ClassVar[bool] = False

    def __init__(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
    ) -> None:
        clipped = [
            config
            for config in clipping_tables(module, fused_params)
            if params[config.name].compute_kernel != EmbeddingComputeKernel.DENSE.value
        ]
        self.tables = tuple(config.name for config in clipped)
        self.features = frozenset(name for config in clipped for name in config.feature_names)
        ClippedGradients.in_use |= bool(clipped)

    @property
    def why_plain(self) -> str:
        """Why batches of bags have to be plain; empty where they need not be."""
        if not self.tables:
            return ""
        return f"as {_OPTION} of tables {shortened(self.tables)} clips the gradient of each row"

    def check_coalesced(self, coalesced: Collection[str]) -> None:
        """Refuse coalesced tables.

        Raises:
            SetupError: names those that clip.
        """
        refuse_coalesced([name for name in self.tables if name in coalesced])

    def check_stored(self, features: Collection[str]) -> None:
        """Refuse a batch whose sequences are looked up, and pooled, once for equal rows.

        Args:
            features: of which it is so.

        Raises:
            ExactnessError: tables that clip have some; names them.
        """
        if clipped := sorted(self.features.intersection(features)):
            raise ExactnessError(
                f"features {shortened(clipped)} are deduplicated, and their tables "
                f"{shortened(self.tables)} have {_OPTION}, which clips the gradient of each row "
                "that is looked up: of rows that are stored once it would clip their sums. Leave "
                "these features out of the converter or of dedup, or clipping out of the optimizer"
            )


def refuse_coalesced(clipping: Sequence[str]) -> None:
    """Refuse tables that clip and whose ids are to be sent once.

    Raises:
        SetupError: there are some; names them.
    """
    if clipping:
        raise SetupError(
            f"tables {shortened(clipping)} are to be coalesced and have {_OPTION}, which clips the "
            "gradient of each row that is looked up: of ids that are sent once it would clip their "
            "sums. Leave one of the two out"
        )


def why_clipped(sharded: nn.Module) -> str:
    """Why a module around an EmbeddingBagCollection needs plain batches; empty where it does not.

    Args:
        sharded: by a sharder whose inner one is of this package.
    """
    return next(filter(None, (clipped.why_plain for clipped in _inside(sharded))), "")


def check_deduplicated(model: nn.Module, batch: ModelInput) -> None:
    """Refuse a batch with deduplicated sequences of tables that clip.

    Args:
        model: with sharded modules of this package's sharders.
        batch: that it is called with.

    Raises:
        ExactnessError: there are some; names them.
    """
    if not ClippedGradients.in_use:
        return
    stored = {*batch.inverse_lookup, *batch.segments}
    for clipped in _inside(model):
        clipped.check_stored(stored)


def _inside(model: nn.Module) -> Iterator[ClippedGradients]:
    for module in model.modules():
        clipped = getattr(module, "clipped", None)
        if isinstance(clipped, ClippedGradients):
            yield clipped


def clips(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of a kernel have it clip gradients."""
    return bool(arguments.get(_OPTION))


def clipping_tables(
    module: EmbeddingBagCollection | EmbeddingCollection,
    fused_params: Mapping[str, Any] | None = None,
) -> list[BaseEmbeddingConfig]:
    """Tables of a module that is not sharded whose fused kernels would clip.

    Args:
        module: with the optimizers that its parameters bring.
        fused_params: of its sharder.
    """
    configs: list[BaseEmbeddingConfig]
    if isinstance(module, EmbeddingBagCollection):
        configs, tables = [*module.embedding_bag_configs()], module.embedding_bags
    else:
        configs, tables = [*module.embedding_configs()], module.embeddings
    found = []
    for config in configs:
        given = dict(fused_params or {})
        # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
        for arguments in getattr(tables[config.name].weight, "_optimizer_kwargs", []):
            given |= arguments
        if clips(given):
            found.append(config)
    return found
