"""Base class of plugins, and context managers that add the plugin's name to errors."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from recd_plugins.runtime.errors import FAILED_CALL, Problem, RecdError

T = TypeVar("T")


class PluginOptions(BaseModel):
    """Base class of plugin options. Immutable, and rejects unknown names, NaN and infinity.

    Options are compared as JSON. Use tuples instead of sets, because sets have no fixed order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Plugin:
    """Base class of plugins of every kind.

    A subclass sets ``name``, such as ``acme.hash`` for ``use: acme.hash`` in registry.yaml, and may
    define a nested class ``Options``. ``recd plugins`` prints the first line of the docstring. The
    module of a subclass must not import torch or torchrec at the top level.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    #: Names of options that do not affect results, such as paths. A resumed run may change them.
    free_options: ClassVar[frozenset[str]] = frozenset()

    class Options(PluginOptions):
        """Options of the plugin. Empty by default."""

    options: PluginOptions
    #: File, line and field of the registry entry, for messages; None without a registry file.
    stands_at: tuple[str, int, str] | None = None

    def __init__(self, options: PluginOptions) -> None:
        self.options = options

    def identity(self) -> dict[str, Any]:
        """Return JSON values, other than options, that affect results, such as a file's digest.

        Resuming a checkpoint requires the same values.

        Raises:
            RecdError: a file of the plugin is missing or invalid.
        """
        return {}

    @property
    def title(self) -> str:
        """Return a label for messages, such as ``registry.yaml:12 converter: acme.rows``."""
        return str(Problem(*self.stands_at, self.name)) if self.stands_at else self.name

    def placed(self, stands_at: tuple[str, int, str] | None) -> Self:
        """Set (file, line, section) of the plugin's entry in registry.yaml. Return the plugin."""
        vars(self)["stands_at"] = stands_at  # works for frozen dataclasses too
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class, options, ``stands_at`` and the result of ``__getstate__``."""
        return _made, (type(self), self.options, self.stands_at), self.__getstate__()

    def __getstate__(self) -> dict[str, Any] | None:
        """Return the attributes to pickle; None if unpickling needs only the options."""
        return None

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the class docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


def _made(
    cls: type[Plugin], options: PluginOptions, stands_at: tuple[str, int, str] | None
) -> Plugin:
    return cls(options).placed(stands_at)


Claims = Literal["one", "optional one", "list", "by feature", "several by feature", "by table"]


@dataclass(frozen=True)
class Kind:
    """Plugin kind, such as ``sharding``, which has its own section in registry.yaml.

    Attributes:
        name: value of the attribute ``kind`` of its plugin classes.
        interface: abstract base class of its plugins.
        section: key of the section in registry.yaml.
        claims: form of the section: ``one`` required plugin, ``optional one``, an ordered ``list``,
            or a list of entries with patterns of features or tables. At most one entry may match a
            feature or table, except with ``several by feature``.
        description: description of the section for ``recd schema``.
        observes: whether plugins of the kind never change results. If so, a resumed run may use
            other plugins.
    """

    name: str
    interface: type[Plugin]
    section: str
    claims: Claims
    description: str
    observes: bool = False

    @property
    def claimed(self) -> Literal["feature", "table"] | None:
        """Whether entries have patterns of features or of tables; None without patterns."""
        if self.claims == "by table":
            return "table"
        return "feature" if "feature" in self.claims else None


@contextmanager
def code_call(name: str, what: str, code: object) -> Iterator[None]:
    """Context manager that adds plugin, method and line of code to errors except RecdErrors.

    Args:
        name: the plugin and its entry, such as ``registry.yaml:9 converter: plugin acme.rows``.
        what: method and purpose, such as ``transform of feature user``.
        code: the called function, or the class of the called method, whose line is reported.
    """
    try:
        yield
    except (RecdError, StopIteration):
        raise
    except Exception as error:
        note = f"{name} failed in {what} ({_place(code, error)})"
        error.add_note(note)
        vars(error).setdefault(FAILED_CALL, note)
        raise


def plugin_call(
    plugin: Plugin, what: str, code: type | None = None
) -> AbstractContextManager[None]:
    """Return a ``code_call`` for a method of a plugin, or of another class ``code``."""
    named = f"plugin {plugin.name!r}"
    title = str(Problem(*plugin.stands_at, named)) if plugin.stands_at else named
    return code_call(title, what, code or type(plugin))


def part_call(part: object, what: str) -> AbstractContextManager[None]:
    """Return a ``code_call`` for an object that extends a command, such as a RunReport."""
    name = f"plugin class {type(part).__module__}.{type(part).__qualname__}"
    return code_call(name, what, type(part))


def plugin_items(plugin: Plugin, what: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items of a plugin's iterable, and add the plugin's name to errors."""
    with plugin_call(plugin, what):
        yield from items


def guard_overrides(cls: type[Plugin]) -> None:
    """Wrap each public method that a class overrides, so that errors name the plugin."""
    for name, method in list(vars(cls).items()):
        overrides = any(name in vars(base) for base in cls.__mro__[1:])
        if inspect.isfunction(method) and overrides and not name.startswith("_"):
            setattr(cls, name, _guarded(method))


def _guarded(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def call(self: Plugin, *arguments: Any, **options: Any) -> T:
        with plugin_call(self, method.__name__):
            return method(self, *arguments, **options)

    return call


def _place(code: Any, error: BaseException) -> str:
    """Return file and line of the innermost frame of an error, preferably in ``code``'s file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
