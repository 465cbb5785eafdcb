"""Silences what TorchRec 1.6 to 1.9 makes torch say about TorchRec's own code.

A user can do nothing about these lines, and they hide those that matter.
"""

from __future__ import annotations

import logging
import os
import warnings


def silence_upstream() -> None:
    """Ignore these, and only these, in this process."""
    # torch.profiler's library prints a line wherever a profile starts or stops (torch 2.13).
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # torchrec.distributed.model_parallel wraps the dense layers with a deprecated argument.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # FBGEMM registers the gradient of its dense CPU kernel in a deprecated way. That it is right is
    # what the parity tests of data-parallel tables show.
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
    # TorchRec's state dicts hold ShardedTensors, which torch takes apart as a checkpoint is loaded.
    warnings.filterwarnings(
        "ignore", message="Please use DTensor instead and we are deprecating ShardedTensor"
    )
    # TorchRec calls collectives of torch by names that torch 2.13 gave up. Who called cannot be
    # told: torch wraps each in its logger.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.\w+` is .*deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
    )
    # torchrec.fx.tracer asks torch.fx whether it is being traced by a name that is to change.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # Said of every data-parallel table, whether it has cache parameters or not.
    logging.getLogger("torchrec.distributed.utils").addFilter(
        lambda record: "caching params will be ignored" not in record.getMessage()
    )
    # Said of every data-parallel table: it stands whole on each rank and has no shards to specify.
    logging.getLogger().addFilter(
        lambda record: not record.getMessage().startswith("Sharding spec not found for ")
    )
