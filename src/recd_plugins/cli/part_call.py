"""Calls of what packages add to a command: a mode of ``recd plan``, a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import click

from recd_plugins.errors import PluginError, RecdError
from recd_plugins.plugin_call import PLUGIN_FAILURES, failure_in_words
from recd_plugins.plugin_modules import qualified


def part_call(part: object, what: str) -> AbstractContextManager[None]:
    """A context in which a method of a part runs, as ``code_call``.

    Args:
        part: whose code runs.
        what: the method.
    """
    return code_call(qualified(type(part)), what, type(part))


@contextmanager
def code_call(name: str, what: str, code: object) -> Iterator[None]:
    """A context in which code of a package runs; its own RecdErrors pass, and those of click.

    Args:
        name: of what the package adds.
        what: the method or function.
        code: the function, or the class that has the method.

    Raises:
        PluginError: anything else was raised, but for what a file system refuses.
    """
    try:
        yield
    except (RecdError, OSError, click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except PLUGIN_FAILURES as error:
        raise PluginError(f"{name}: {failure_in_words(what, error, code)}") from error
