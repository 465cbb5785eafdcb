"""How the gradients of dense layers are summed over ranks."""

from __future__ import annotations

from torchrec.distributed.model_parallel import DefaultDataParallelWrapper


def summed_in_fixed_buckets() -> DefaultDataParallelWrapper:
    """A wrapper whose first step sums in the order of all others.

    TorchRec's default makes the buckets of DistributedDataParallel anew after the first step, and
    where a gradient stands in its bucket decides in which order three or more ranks sum it. A run
    that goes on from a checkpoint would differ by rounding from one that never stopped. To look
    for unused parameters is what keeps the buckets; it costs a walk over the graph of a step.
    """
    return DefaultDataParallelWrapper(
        static_graph=False,
        find_unused_parameters=True,
        ddp_kwargs={"skip_all_reduce_unused_params": True},
    )
