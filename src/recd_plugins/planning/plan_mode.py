"""Plugin interfaces for modes of ``recd plan`` and for measurements of clusters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.config.manager import PluginManager

if TYPE_CHECKING:
    import click
    import torch
    from rich.console import RenderableType

    from recd_plugins.config import RunConfig
    from recd_plugins.planning.topologies import TopologySpec


@dataclass(frozen=True)
class PlanQuestion:
    """Arguments of the ``recd plan`` command, passed to ``PlanMode.plan``.

    Attributes:
        registry: loaded run config, not prepared.
        topology, spec: name of the topology, and its memory and speed.
        batch_size: rows per rank; None for the largest batch that fits.
        options: dict from name to value of the mode's own options.
        say: function that prints progress.
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
    """Result of a mode of ``recd plan``: text, and a function that returns the JSON values."""

    text: RenderableType
    as_json: Callable[[], Mapping[str, Any]]


class PlanMode(ABC):
    """A mode of ``recd plan``, added by the hook ``register_plans``.

    The class is instantiated without arguments. Its module must not import torch at the top,
    because ``recd plan --help`` loads every mode::

        class Replicas(PlanMode):
            flag = "--replicas"
            help = "Plan which tables each rank has a copy of."

            def options(self):
                return [click.Option(["--copies"], type=int, help="Maximum number of copies.")]

            def plan(self, question):
                from acme.planning import plan_replicas

                found = plan_replicas(question.registry, question.spec, question.options["copies"])
                return PlanAnswer(found.table(), found.as_json)

    Attributes:
        flag: command-line flag that selects the mode.
        help: help text of the flag.
        takes_topology: whether it accepts ``--topology``, ``--nodes`` and ``--ranks-per-node``.
        takes_auto: whether it accepts ``--batch-size auto``.
        because: reason for rejecting these options, shown in messages after the flag, such as
            "plans for a fixed batch size".
    """

    flag: ClassVar[str]
    help: ClassVar[str]
    takes_topology: ClassVar[bool] = True
    takes_auto: ClassVar[bool] = False
    because: ClassVar[str] = "does not take every option"

    def options(self) -> Sequence[click.Option]:
        """Return the mode's click options; their help texts get the prefix ``With FLAG:``."""
        return ()

    def check(self, options: Mapping[str, Any], auto: bool) -> None:  # noqa: B027
        """Raise an error for contradicting options, before any other work.

        Args:
            options: dict from name to value of the mode's own options.
            auto: whether ``--batch-size auto`` was given.

        Raises:
            click.UsageError: options contradict each other.
        """

    @abstractmethod
    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Compute the plan.

        Raises:
            RecdError: no plan was found.
        """


class TablesPlan(PlanMode):
    """``recd plan`` without a mode: plans the tables and compares with TorchRec's own plan."""

    takes_auto = True

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Read the first rows of the data, and plan the tables."""
        from recd_plugins.planning.report import render
        from recd_plugins.planning.study import study

        question.say("reading the first rows")
        asked = question.topology, question.spec, question.batch_size, question.say
        report = study(question.registry, *asked)
        return PlanAnswer(render(report), report.as_json)


class Measurement(ABC):
    """Interface to measure clusters, added by the hook ``register_measurements``.

    The class is instantiated without arguments and pickled to be sent to ranks. Its module must not
    import torch at the top::

        class Ping(Measurement):
            def cluster(self, device):
                from acme.ping import ping_all_ranks

                return this_machine(4, nodes=2).model_copy(update=ping_all_ranks(device))
    """

    @abstractmethod
    def cluster(self, device: torch.device) -> TopologySpec:
        """Measure this process group, and return the same topology on every rank.

        All ranks call this method together. A run on several nodes without a topology calls it
        first, so it must be fast and must not draw random numbers.

        Args:
            device: device of this rank.
        """


def measurement(plugins_dir: Path | None = None) -> Measurement | None:
    """Return the ``Measurement`` of the last plugin that registers one, or None.

    Plugin files in ``plugins_dir`` come after installed packages.
    """
    found = PluginManager(plugins_dir).items("register_measurements")
    return found[-1]() if found else None
