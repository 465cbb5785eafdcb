"""``torchrec.uvm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from recd_plugins.api import Cache, PluginOptions, SetupError, Table

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints


class Uvm(Cache):
    """FBGEMM's UVM caching: tables in host memory, their hot rows in GPU memory."""

    name = "torchrec.uvm"

    class Options(PluginOptions):
        """Size and policy of the cache."""

        load_factor: float = Field(
            default=0.2, gt=0, le=1, description="Rows in GPU memory, as a share of the table."
        )
        algorithm: Literal["lru", "lfu"] = Field(
            default="lru", description="Which rows stay: last used, or most used."
        )

    def check(self, device: torch.device) -> None:
        """Refuse a device that is not CUDA.

        Raises:
            SetupError: says what to do.
        """
        if device.type != "cuda":
            raise SetupError(
                f"{self.name} needs CUDA, as it caches host memory in GPU memory, and this run is "
                f"on {device.type}: set enabled: false on its cache entry, or train on a machine "
                'with a GPU (pip install "recd-plugins[cuda]")'
            )

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """The caching kernel and its parameters for each of ``tables``."""
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import CacheParams

        options = cast(Uvm.Options, self.options)
        return {
            table.name: ParameterConstraints(
                compute_kernels=["fused_uvm_caching"],
                cache_params=CacheParams(
                    algorithm=CacheAlgorithm[options.algorithm.upper()],
                    load_factor=options.load_factor,
                ),
            )
            for table in tables
        }
