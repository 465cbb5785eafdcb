"""Modules of every rank, imported once by the fork server."""

from __future__ import annotations

import gc

from recd_plugins.runtime.imports import without_collections

with without_collections():
    import recd_plugins.data.worker_imports
    import recd_plugins.training.trainer  # noqa: F401

# No collection in a rank walks through what it shares with the server.
gc.collect()
gc.freeze()
