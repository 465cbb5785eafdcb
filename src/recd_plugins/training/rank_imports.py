"""Imports the modules that every rank needs into the process from which ranks are forked."""

from __future__ import annotations

import gc

from recd_plugins.runtime.imports import without_collections

with without_collections():
    import torch.distributed.optim  # noqa: F401

    import recd_plugins.data.worker_imports
    import recd_plugins.training.trainer  # noqa: F401

# Exclude objects shared with the server from garbage collection in ranks.
gc.collect()
gc.freeze()
