"""What every plugin has: a qualified name, options, a kind."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from recd_plugins.errors import Problem


class PluginOptions(BaseModel):
    """Base of a plugin's options: immutable; unknown names, nan and inf are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
