"""Interfaces of ``recd plan``: its modes, and measurements of machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.errors import PluginError, SetupError
from recd_plugins.runtime.plugin_modules import qualified

if TYPE_CHECKING:
    import click
    import torch
    from rich.console import RenderableType

    from recd_plugins.config import RunConfig
    from recd_plugins.interfaces.step_cost import CollectiveRates
    from recd_plugins.planning.topologies import TopologySpec


@dataclass(frozen=True)
class PlanQuestion:
    """Arguments of ``recd plan``.

    Attributes:
        registry: loaded, not prepared.
        plugins_dir: of the registry.
        topology: its name.
        spec: its ranks.
        batch_size: rows of a rank; None searches for the largest that fits.
        options: values of the mode's own options, by name.
        say: shows progress.
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
    """Result of ``recd plan``.

    Attributes:
        text: for the terminal.
        as_json: returns the values of ``--json``.
        plot: draws the picture of ``--plot``; its suffix is the format.
    """

    text: RenderableType
    as_json: Callable[[], Mapping[str, Any]]
    plot: Callable[[Path], None] | None = None


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
        flag: selects the mode.
        help: of the flag.
        takes_topology: whether ``--topology``, ``--nodes`` and ``--ranks-per-node`` go with it.
        takes_auto: whether ``--batch-size auto`` does.
        calibrates: what ``--calibrate`` measures: this machine, or the ranks of ``--topology`` if
            they fit on it; None: it does not go with the mode.
        because: why options do not go with the mode, following its flag in messages.
    """

    flag: ClassVar[str]
    help: ClassVar[str]
    takes_topology: ClassVar[bool] = True
    takes_auto: ClassVar[bool] = False
    calibrates: ClassVar[Literal["machine", "topology"] | None] = None
    because: ClassVar[str] = "does not take every option"

    def options(self) -> Sequence[click.Option]:
        """Return options of the mode; ``With FLAG:`` is put before their help."""
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
            The topology to plan for, and the measurement for the terminal.
        """
        raise PluginError(f"recd plan {self.flag} measures nothing: it has no calibrate")

    @abstractmethod
    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Return the plan.

        Raises:
            RecdError: there is none.
        """


class TablesPlan(PlanMode):
    """The plan of the tables, next to TorchRec's own: ``recd plan`` without a flag."""

    takes_auto = True
    calibrates = "machine"

    def calibrate(self, question: PlanQuestion, path: Path) -> tuple[TopologySpec, RenderableType]:
        """Train a few steps on this machine."""
        question.say("training a few steps to see what they cost")
        return needed_measurement("--calibrate", question.plugins_dir).steps(question, path)

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Read the first rows, and plan."""
        from recd_plugins.planning.report import plot, render
        from recd_plugins.planning.study import study

        question.say("reading the first rows")
        asked = question.topology, question.spec, question.batch_size, question.say
        report = study(question.registry, *asked)
        return PlanAnswer(render(report), report.as_json, partial(plot, report))


class Measurement(ABC):
    """A way to measure machines; the hook ``register_measurements`` adds it.

    A subclass is made without arguments, and is pickled for ranks. Its module imports neither torch
    nor torchrec at the top::

        class Ping(Measurement):
            def cluster(self, device):
                from acme.ping import ping_all_ranks

                return this_machine(4, nodes=2).model_copy(update=ping_all_ranks(device))
    """

    @abstractmethod
    def cluster(self, device: torch.device) -> TopologySpec:
        """Measure the ranks of this process group; the same on every rank. Collective.

        A run on several nodes that names no topology starts with it, so it takes seconds and draws
        no random numbers.

        Args:
            device: of this rank.

        Raises:
            SetupError: nodes have different numbers of ranks, or another rank has ended.
        """

    def steps(
        self,
        question: PlanQuestion,  # noqa: ARG002
        path: Path,  # noqa: ARG002
    ) -> tuple[TopologySpec, RenderableType]:
        """Measure the stages of a registry's steps here, for ``recd plan --calibrate``.

        Args:
            question: the plan that follows.
            path: the topology file to write.

        Returns:
            The topology to plan for, and the measurement for the terminal.
        """
        raise PluginError(f"{qualified(type(self))} measures no steps: it has no method steps")


def measurement(plugins_dir: Path | None = None) -> Measurement | None:
    """Return the measurement that was registered last, files of plugins after packages."""
    found: list[type[Measurement]] = []
    PluginManager(plugins_dir).hand("register_measurements", lambda cls, _: found.append(cls))
    return found[-1]() if found else None


def needed_measurement(what: str, plugins_dir: Path | None = None) -> Measurement:
    """Return the measurement that ``what`` needs.

    Raises:
        SetupError: there is none.
    """
    if (found := measurement(plugins_dir)) is None:
        raise SetupError(
            f"{what} needs a package that measures machines, and none is installed; the "
            "distribution recd-plugins brings one"
        )
    return found


def measure_collectives(world_size: int, ranks_per_node: int, device_type: str) -> CollectiveRates:
    """Start ranks here, also on pretended nodes, and measure their collectives.

    Args:
        world_size: number of ranks.
        ranks_per_node: ranks that count as a node.
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).
    """
    from recd_plugins.runtime.launch import backend_for, launch

    return launch(
        _rates,
        world_size,
        needed_measurement("measuring collectives"),
        device_type,
        backend=backend_for(device_type),
        local_world_size=ranks_per_node,
    )[0]


def _rates(
    rank: int,  # noqa: ARG001
    world_size: int,  # noqa: ARG001
    measured_by: Measurement,
    device_type: str,
) -> CollectiveRates:
    from recd_plugins.config.device import device_of_rank

    return measured_by.cluster(device_of_rank(device_type)).collective_rates
