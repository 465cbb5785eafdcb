"""Ranks and their devices, lookup kernels, and the bytes that collectives send.

For shardings and caches with modules of their own, which import it inside methods. The bases of
sharders, of sharded modules and of lookup kernels are names of ``recd_plugins.api`` itself. Needs
torch and TorchRec.
"""

from recd_plugins.compat.lookup_kernels import (
    RowKernel,
    close_kernels,
    row_kernels,
    tell_when_asked,
)
from recd_plugins.compat.portable_kernels import PortableEmbedding, PortableEmbeddingBag
from recd_plugins.compat.row_wise_adagrad import use_row_wise_adagrad
from recd_plugins.compat.torchrec_internals import require_attributes
from recd_plugins.distributed.device import choose_device, device_of_rank, lack_for_cuda
from recd_plugins.distributed.launch import (
    Ranks,
    backend_for,
    join_torchrun,
    launch,
    torchrun_rank,
    torchrun_ranks_per_node,
)
from recd_plugins.distributed.process_groups import new_group
from recd_plugins.distributed.rank_agreement import check_agreement, ranks_of_each_node, tell_all
from recd_plugins.distributed.watch import HangLimits, watched_by_each_other
from recd_plugins.sharding.batch_form import refuse_inverse_indices
from recd_plugins.sharding.byte_counter import CollectiveBytes, Traffic, lookup_ids
from recd_plugins.sharding.coalesced.input_dist import unique_ids
from recd_plugins.sharding.guards import guard
from recd_plugins.sharding.overlap import LookupAhead
from recd_plugins.sharding.sharders import fused_params, stock_sharders
from recd_plugins.values.channels import Channel, CollectiveKind, resolve_group
from recd_plugins.values.internal import Internal

__all__ = [
    "Channel",
    "CollectiveBytes",
    "CollectiveKind",
    "HangLimits",
    "Internal",
    "LookupAhead",
    "PortableEmbedding",
    "PortableEmbeddingBag",
    "Ranks",
    "RowKernel",
    "Traffic",
    "backend_for",
    "check_agreement",
    "choose_device",
    "close_kernels",
    "device_of_rank",
    "fused_params",
    "guard",
    "join_torchrun",
    "lack_for_cuda",
    "launch",
    "lookup_ids",
    "new_group",
    "ranks_of_each_node",
    "refuse_inverse_indices",
    "require_attributes",
    "resolve_group",
    "row_kernels",
    "stock_sharders",
    "tell_all",
    "tell_when_asked",
    "torchrun_rank",
    "torchrun_ranks_per_node",
    "unique_ids",
    "use_row_wise_adagrad",
    "watched_by_each_other",
]
