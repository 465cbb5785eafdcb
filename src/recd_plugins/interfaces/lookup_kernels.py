"""Lookup kernels of a plugin, in place of TorchRec's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
    from torchrec.distributed.types import ParameterSharding, ShardingType
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig


class LookupKernels(ABC):
    """Makes the kernels that look some tables up, in place of TorchRec's.

    Attributes:
        compute_kernel: TorchRec's name of the kernel that a plan gives these tables.
    """

    compute_kernel: str

    @property
    @abstractmethod
    def tables(self) -> Collection[str]:
        """Names of the tables. Those of other modules do no harm."""

    @abstractmethod
    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> nn.Module:
        """The kernel of a group of these tables, with pooling, as TorchRec would construct it."""

    @abstractmethod
    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> nn.Module:
        """The same without pooling."""

    def as_planned(
        self,
        params: Mapping[str, ParameterSharding],  # noqa: ARG002
        configs: Iterable[BaseEmbeddingConfig],  # noqa: ARG002
    ) -> Self:
        """The same for one module, with what the plan decided of its tables."""
        return self

    def prefetches(self, table: str) -> bool:  # noqa: ARG002
        """Whether a table wants its rows fetched before the batch that needs them is computed."""
        return False
