"""Calls of what packages add to a command: a mode of ``recd plan``, a file of ``recd run``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from recd_plugins.errors import PluginError, RecdError
from recd_plugins.plugin_call import PLUGIN_FAILURES, failure_in_words
from recd_plugins.plugin_modules import qualified


@contextmanager
def part_call(part: object, what: str) -> Iterator[None]:
    """A context in which code of a part runs; its own RecdErrors pass, and those of click.

    Args:
        part: whose code runs.
        what: the method.

    Raises:
        PluginError: anything else was raised, but for what a file system refuses.
    """
    try:
        yield
    except (RecdError, OSError, click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except PLUGIN_FAILURES as error:
        cls = type(part)
        raise PluginError(f"{qualified(cls)}: {failure_in_words(what, error, cls)}") from error
