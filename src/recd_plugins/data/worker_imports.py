"""What every reader worker needs, imported once by the server that workers are forked from."""

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


# The first call of any kernel makes numba import and set up most of itself, and the first array
# that goes to numpy makes pyarrow import pandas, where it is installed.
_nothing()
pa.array([0]).to_numpy()

# No collection in a worker walks through what it shares with the server.
gc.collect()
gc.freeze()
