"""Imports that reader workers need, done once in the server process that forks the workers."""

from __future__ import annotations

import gc

from recd_plugins.runtime.imports import without_collections

with without_collections():
    import numba
    import pyarrow as pa
    import pyarrow.parquet

    import recd_plugins.data.loader  # noqa: F401


@numba.njit(cache=True)
def _nothing() -> None:
    pass


# Sets up numba, and imports pandas (through pyarrow).
_nothing()
pa.array([0]).to_numpy()

# Garbage collections in workers skip objects shared with the server.
gc.collect()
gc.freeze()
