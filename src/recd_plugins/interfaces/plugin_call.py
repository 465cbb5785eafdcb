"""Calls of plugins: whatever they raise gets a note that names the plugin and its line of code."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from recd_plugins.runtime.errors import RecdError

if TYPE_CHECKING:
    from recd_plugins.interfaces.plugin import Plugin

T = TypeVar("T")


@contextmanager
def code_call(name: str, what: str, code: object) -> Iterator[None]:
    """Add a note to what code of a package raises; RecdErrors say what to do and pass as they are.

    Args:
        name: of the plugin or part.
        what: the method and what it is called for, as ``transform of feature user``.
        code: the function, or the class that has the method.
    """
    try:
        yield
    except (RecdError, StopIteration):
        raise
    except Exception as error:
        error.add_note(f"{name}: {what} failed at {_place(code, error)}")
        raise


def plugin_call(
    plugin: Plugin, what: str, code: type | None = None
) -> AbstractContextManager[None]:
    """Call code of ``plugin`` as in ``code_call``; ``code`` has the method, if not its class."""
    return code_call(plugin.title, what, code or type(plugin))


def part_call(part: object, what: str) -> AbstractContextManager[None]:
    """Call a method of what a package adds to a command, as in ``code_call``."""
    return code_call(f"{type(part).__module__}.{type(part).__qualname__}", what, type(part))


def plugin_items(plugin: Plugin, what: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, each taken in a ``plugin_call``."""
    with plugin_call(plugin, what):
        yield from items


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


def _place(code: Any, error: BaseException) -> str:
    """File and line: the last one in the file of ``code``, else the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
