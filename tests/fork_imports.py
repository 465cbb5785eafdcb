"""What the server imports that processes of tests are forked from: all that any of them needs."""

from __future__ import annotations

import gc

from recd_plugins.imports import without_collections

with without_collections():
    import click
    import pytest  # noqa: F401

    import recd_plugins.cli.run
    import recd_plugins.testing.gloo
    import recd_plugins.training.rank_imports  # noqa: F401
    from recd_plugins.cli import main
    from recd_plugins.manager import PluginManager

    PluginManager().plugins  # noqa: B018
    main.list_commands(click.Context(main))

gc.collect()
gc.freeze()
