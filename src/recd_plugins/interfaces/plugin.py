"""What every plugin has: a qualified name, options, a kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from recd_plugins.runtime.errors import Problem


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
