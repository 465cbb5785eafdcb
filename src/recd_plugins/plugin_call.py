"""Calls of plugins' methods: what they raise names the plugin and its line of code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from recd_plugins.errors import PluginError, RecdError
from recd_plugins.interfaces.plugin import Plugin

T = TypeVar("T")

_END = object()


@contextmanager
def plugin_call(plugin: Plugin, what: str) -> Iterator[None]:
    """A context in which code of ``plugin`` runs; its own RecdErrors pass.

    Args:
        plugin: whose code runs.
        what: the method and what it is called for, as ``transform of feature user``.

    Raises:
        PluginError: anything else was raised. The cause holds the whole traceback.
    """
    try:
        yield
    except RecdError:
        raise
    except Exception as error:
        raise PluginError(
            f"{plugin.name}: {what} failed at {_place(plugin, error)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def plugin_items(plugin: Plugin, what: str, items: Iterable[T]) -> Iterator[T]:
    """The same items, which code of ``plugin`` yields: each is taken in a ``plugin_call``."""
    iterator = iter(items)
    while True:
        with plugin_call(plugin, what):
            item = next(iterator, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


def _place(plugin: Plugin, error: Exception) -> str:
    """File and line: the last in the plugin's own file, for what it called is seldom at fault."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
