"""Imports of the fork server of test processes."""

from __future__ import annotations

import fcntl
import gc

from recd_plugins.runtime.imports import without_collections

with without_collections():
    import click
    import numpy as np
    import pytest  # noqa: F401

    import recd_plugins.cli.run
    import recd_plugins.testing.gloo
    import recd_plugins.training.rank_imports  # noqa: F401
    from recd_plugins.cli import main
    from recd_plugins.config.manager import PluginManager
    from recd_plugins.runtime.versions import installed_set
    from recd_plugins.sparse.dedup import Deduplicator

    PluginManager().plugins  # noqa: B018
    main.list_commands(click.Context(main))
    installed_set()
    # Compile the slowest numba kernel once, 7 s.
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Deduplicator()([[(np.arange(4), np.array([0, 2, 4]))]], 2)

# Processes of tests are short.
gc.set_threshold(20_000, 20, 20)
gc.collect()
gc.freeze()
