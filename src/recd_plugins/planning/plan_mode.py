"""A mode of ``recd plan``: what a flag plans in place of the tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from recd_plugins.errors import PluginError

if TYPE_CHECKING:
    import click
    from rich.console import RenderableType

    from recd_plugins.planning.topologies import TopologySpec
    from recd_plugins.registry import RunConfig


@dataclass(frozen=True)
class PlanQuestion:
    """What ``recd plan`` is asked.

    Attributes:
        registry: loaded, not prepared.
        plugins_dir: of the registry.
        topology: its name.
        spec: its ranks.
        batch_size: rows of a rank; None looks for the most that fit.
        options: values of the mode's own options, by name.
        say: shows what is being done while it takes.
    """

    registry: RunConfig
    plugins_dir: Path | None
    topology: str
    spec: TopologySpec
    batch_size: int | None
    options: Mapping[str, Any]
    say: Callable[[str], None]


@dataclass(frozen=True)
class PlanAnswer:
    """What ``recd plan`` answers.

    Attributes:
        text: for the terminal.
        as_json: makes the values of ``--json``.
        plot: draws ``--plot``'s picture; its suffix is the format.
    """

    text: RenderableType
    as_json: Callable[[], Mapping[str, Any]]
    plot: Callable[[Path], None]


class PlanMode(ABC):
    """A mode of ``recd plan``; the hook ``register_plans`` adds it.

    A subclass is made without arguments. Its module imports neither torch nor torchrec at the top,
    as ``recd plan --help`` shows every mode::

        class Replicas(PlanMode):
            flag = "--replicas"
            help = "Plan replicas instead: which tables each rank has a copy of."

            def options(self):
                return [click.Option(["--copies"], type=int, help="At most so many.")]

            def plan(self, question):
                from acme.planning import plan_replicas

                found = plan_replicas(question.registry, question.spec, question.options["copies"])
                return PlanAnswer(found.table(), found.as_json, found.draw)

    Attributes:
        flag: chooses the mode.
        help: of the flag.
        takes_topology: whether ``--topology``, ``--nodes`` and ``--ranks-per-node`` go with it.
        takes_auto: whether ``--batch-size auto`` does.
        calibrates: what ``--calibrate`` measures: this machine, or the ranks of ``--topology`` if
            they fit on it; None: it does not go with the mode.
        because: why options do not go with the mode, in words that follow its flag.
    """

    flag: ClassVar[str]
    help: ClassVar[str]
    takes_topology: ClassVar[bool] = True
    takes_auto: ClassVar[bool] = False
    calibrates: ClassVar[Literal["machine", "topology"] | None] = None
    because: ClassVar[str] = "does not take every option"

    def options(self) -> Sequence[click.Option]:
        """Options that are for the mode alone; ``With FLAG:`` is put before what they say."""
        return ()

    def check(self, options: Mapping[str, Any], auto: bool) -> None:  # noqa: B027
        """Refuse options that do not go together, before any work.

        Args:
            options: values of the mode's own options, by name.
            auto: whether the batch size is looked for.

        Raises:
            click.UsageError: says which.
        """

    def calibrate(
        self,
        question: PlanQuestion,  # noqa: ARG002
        path: Path,  # noqa: ARG002
    ) -> tuple[TopologySpec, RenderableType]:
        """Measure for ``--calibrate``, and write the topology file ``path``.

        Returns:
            The topology to plan for, and what was measured, for the terminal.
        """
        raise PluginError(f"recd plan {self.flag} measures nothing: it has no calibrate")

    @abstractmethod
    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """The plan.

        Raises:
            RecdError: there is none.
        """
