"""Calls of plugins' methods: what they raise names the plugin and its line of code."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recd_plugins.errors import PluginError, RecdError

if TYPE_CHECKING:
    from recd_plugins.interfaces.plugin import Plugin

T = TypeVar("T")

#: What code of plugins ends with: sys.exit too, which would end a command as if all were well.
PLUGIN_FAILURES = (Exception, SystemExit)

_END = object()
_OWN_FILES = f"{Path(__file__).parent}{os.sep}"


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
    except PLUGIN_FAILURES as error:
        raise plugin_failure(plugin, what, error) from error


@contextmanager
def plugin_code(plugin: Plugin, what: str, cls: type) -> Iterator[None]:
    """A context in which code of ``plugin`` runs amid that of others, which may fail on their own.

    Collectives, for one, fail wherever they are called when another rank has ended.

    Args:
        plugin: whose code runs.
        what: the method.
        cls: the class that has it.

    Raises:
        PluginError: the file of ``cls`` raised something else than a RecdError, or had a library
            do what failed, but for collectives and code of recd-plugins.
    """
    try:
        yield
    except (RecdError, StopIteration):
        raise
    except PLUGIN_FAILURES as error:
        if _is_own(cls, error):
            raise plugin_failure(plugin, what, error, cls) from error
        raise


def guard_methods(cls: type[Plugin], names: Iterable[str]) -> None:
    """Let methods that a class defines itself run in a ``plugin_call``, whoever calls them."""
    for name in names:
        if inspect.isfunction(method := vars(cls).get(name)):
            setattr(cls, name, _guarded(method))


def _guarded(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def call(self: Plugin, *arguments: Any, **options: Any) -> T:
        with plugin_call(self, method.__name__):
            return method(self, *arguments, **options)

    return call


def plugin_failure(
    plugin: Plugin | type[Plugin], what: str, error: BaseException, code: type | None = None
) -> PluginError:
    """The error for what code of a plugin raised, with its line.

    Args:
        plugin: whose code; a class where no entry's line is to be named.
        what: the method and what it was called for.
        error: that was raised.
        code: the class that has the method, where that is not the plugin's.
    """
    cls = plugin if isinstance(plugin, type) else type(plugin)
    name = plugin.name if isinstance(plugin, type) else plugin.title
    return PluginError(f"{name}: {failure_in_words(what, error, code or cls)}")


def failure_in_words(what: str, error: BaseException, code: object) -> str:
    """That a method of the class, or the function, ``code`` raised ``error``, and on which line."""
    return f"{what} failed at {_place(code, error)}: {type(error).__name__}: {error}"


def plugin_items(plugin: Plugin, what: str, items: Iterable[T]) -> Iterator[T]:
    """The same items, which code of ``plugin`` yields: each is taken in a ``plugin_call``."""
    iterator = iter(items)
    while True:
        with plugin_call(plugin, what):
            item = next(iterator, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


def _place(code: object, error: BaseException) -> str:
    """File and line: the last in the own file of ``code``; what it called is seldom at fault."""
    frames = traceback.extract_tb(error.__traceback__)
    file = _file(code)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _is_own(cls: type, error: BaseException) -> bool:
    """Whether an error is of the class's own file, or of a library that it called itself."""
    # The first is that of the context, the second has called the method.
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][2:]
    # What decorates a method stands in a file of its own.
    own = {_file(cls), *(files[:1] if files and not _is_of_libraries(files[0]) else [])}
    last = max((at for at, file in enumerate(files) if file in own), default=None)
    if last is None:
        return False
    below = files[last + 1 :]
    return not any("/distributed/" in name or name.startswith(_OWN_FILES) for name in below)


def _is_of_libraries(file: str) -> bool:
    """Whether a file is recd-plugins' own, or torch's or TorchRec's."""
    return file.startswith(_OWN_FILES) or "/torch/" in file or "/torchrec/" in file


def _file(code: object) -> str | None:
    return getattr(sys.modules.get(code.__module__), "__file__", None)
