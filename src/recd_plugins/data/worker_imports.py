"""What every reader worker needs, imported once by the server that workers are forked from."""

from __future__ import annotations

import numba
import pyarrow.parquet  # noqa: F401

import recd_plugins.data.row_pipeline
import recd_plugins.data.workers
import recd_plugins.training.placement  # noqa: F401


@numba.njit(cache=True)
def _nothing() -> None:
    pass


# The first call of any kernel makes numba import and set up most of itself.
_nothing()
