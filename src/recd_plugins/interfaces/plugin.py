"""What every plugin has: a qualified name, options, a kind."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from recd_plugins.runtime.errors import Problem, RecdError


class PluginOptions(BaseModel):
    """Base of a plugin's options: immutable; unknown names, nan and inf are errors.

    What a set holds is dumped as JSON in one order: ranks, and runs that go on, compare it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_serializer(mode="wrap", when_used="json")  # of a field it would replace the type's own
    def _sets_in_order(self, dump: SerializerFunctionWrapHandler) -> Any:
        return _in_order(self, dump(self))


def _in_order(value: Any, dumped: Any) -> Any:
    """What was dumped of a value; of a set sorted, as that has another order in each process."""
    if isinstance(value, BaseModel) and isinstance(dumped, dict):
        return {name: _in_order(getattr(value, name, None), each) for name, each in dumped.items()}
    is_like = isinstance(value, Collection) and isinstance(dumped, list | dict)
    if not is_like or len(value) != len(dumped):  # one value, or by a serializer of its own
        return dumped
    if isinstance(value, Set) and isinstance(dumped, list):
        return sorted(dumped, key=lambda each: (len(repr(each)), repr(each)))  # 2 before 10
    if isinstance(dumped, list):
        return list(map(_in_order, value, dumped))
    if not isinstance(value, Mapping):
        return dumped
    return dict(zip(dumped, map(_in_order, value.values(), dumped.values()), strict=True))


class Plugin:
    """Base of every kind.

    A subclass sets ``name`` (``"package.part"``, the word after ``use:`` in registry.yaml), may
    nest an ``Options`` model, and starts its docstring with the line that ``recd plugins`` shows.
    Its module must import neither torch nor torchrec at the top: ``recd validate`` reads plugins
    on machines that have no use for them.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    #: Options that no result depends on, as where files lie or how many batches are read ahead:
    #: a run that goes on from a checkpoint may have other ones.
    free_options: ClassVar[frozenset[str]] = frozenset()

    class Options(PluginOptions):
        """No options."""

    options: PluginOptions
    #: File, line and field of its entry, which messages name; None of one that no file names.
    stands_at: tuple[str, int, str] | None = None

    def __init__(self, options: PluginOptions) -> None:
        self.options = options

    def identity(self) -> dict[str, Any]:
        """What results depend on besides the options, JSON values, as a digest of a file's content.

        A run goes on from a checkpoint only where this is what it was. It is asked in the trainer.

        Raises:
            RecdError: what it would say is missing or wrong.
        """
        return {}

    @property
    def title(self) -> str:
        """What messages call it: ``registry.yaml:12 converter: acme.rows``, of a file."""
        return str(Problem(*self.stands_at, self.name)) if self.stands_at else self.name

    def placed(self, stands_at: tuple[str, int, str] | None) -> Self:
        """Itself, of the entry that stands there."""
        vars(self)["stands_at"] = stands_at  # of a class that is frozen, too
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its class, options and place, and what ``__getstate__`` returns."""
        return _made, (type(self), self.options, self.stands_at), self.__getstate__()

    def __getstate__(self) -> dict[str, Any] | None:
        """Attributes that a copy in another process has too; None: it makes its own."""
        return None

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


def _made(
    cls: type[Plugin], options: PluginOptions, stands_at: tuple[str, int, str] | None
) -> Plugin:
    return cls(options).placed(stands_at)


Claims = Literal["one", "optional one", "list", "by feature", "several by feature", "by table"]


@dataclass(frozen=True)
class Kind:
    """A kind of plugins, with a section of registry files to name them in.

    Attributes:
        name: what a plugin class has as ``kind``.
        interface: the abstract class that its plugins are subclasses of; its ``kind`` is ``name``.
        section: the key of registry files.
        claims: what stands there: ``one`` plugin, which every file has to name; an ``optional
            one``; a ``list``, whose order counts; or a list whose entries are each for the features
            or tables that their patterns match. Of these a feature or table has one, and with
            ``several by feature`` any number, in the order of the file.
        description: of the section, which ``recd schema`` shows.
        contract: the class with the tests that every plugin of the kind passes, by module and name.
        observes: whether no result depends on its plugins, as where they only look on: a run that
            goes on from a checkpoint may have others, and is told.
    """

    name: str
    interface: type[Plugin]
    section: str
    claims: Claims
    description: str
    contract: str
    observes: bool = False

    @property
    def claimed(self) -> Literal["feature", "table"] | None:
        """What patterns of an entry match; None where it has none."""
        if self.claims == "by table":
            return "table"
        return "feature" if "feature" in self.claims else None


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
