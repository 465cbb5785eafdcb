"""What the server imports that processes of tests are forked from: all that any of them needs."""

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
    from recd_plugins.compat.torchrec_internals import refuse_other_versions
    from recd_plugins.config.manager import PluginManager
    from recd_plugins.runtime.versions import installed_set
    from recd_plugins.sparse.dedup import Deduplicator

    PluginManager().plugins  # noqa: B018
    main.list_commands(click.Context(main))
    # Asked once a process, and by every rank.
    refuse_other_versions()
    installed_set()
    # What numba takes longest to compile, 7 s, is compiled here, once, and not by each rank and
    # reader of the first tests.
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Deduplicator()([[(np.arange(4), np.array([0, 2, 4]))]], 2)

# Tests are short, and runs in them: looking for garbage less often takes less than garbage does.
gc.set_threshold(20_000, 20, 20)
gc.collect()
gc.freeze()
