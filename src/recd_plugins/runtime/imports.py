"""Helpers for slow imports and optional libraries, and filters for warnings of TorchRec."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from recd_plugins.runtime.errors import SetupError


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in this context, which speeds up importing torch by a quarter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def optional_library(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional library, which ``pip install recd-plugins[extra]`` installs.

    Raises:
        SetupError: the library is not installed. The message has the pip command to install it, and
            names the feature ``what`` that needs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise SetupError(
            f"{what} needs the package {module.partition('.')[0]!r}, which cannot be imported "
            f'({error}). Run pip install "recd-plugins[{extra}]".'
        ) from error


def silence_upstream() -> None:
    """Silence warnings of torch and TorchRec (1.6 to 1.9) that a user cannot avoid."""
    # Kineto prints a line at the start and stop of each profile (torch 2.13).
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # torchrec.distributed.model_parallel wraps the dense layers with a deprecated argument.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # FBGEMM registers the gradient of its dense CPU kernel in a deprecated way; parity tests of
    # data-parallel tables cover that gradient.
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
    # TorchRec's state dicts hold ShardedTensors.
    warnings.filterwarnings(
        "ignore", message="Please use DTensor instead and we are deprecating ShardedTensor"
    )
    # TorchRec calls collectives by names that torch 2.13 deprecates, through torch's own logger.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.\w+` is .*deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
    )
    # torchrec.fx.tracer asks torch.fx for its state by a name that is to change.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # Logged for every data-parallel table, with or without cache parameters.
    logging.getLogger("torchrec.distributed.utils").addFilter(
        lambda record: "caching params will be ignored" not in record.getMessage()
    )
    # Logged for every data-parallel table, which has no shards.
    logging.getLogger().addFilter(
        lambda record: not record.getMessage().startswith("Sharding spec not found for ")
    )
