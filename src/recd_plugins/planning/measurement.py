"""Measurements of machines, which packages bring: what ranks reach, and what steps cost on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugins.errors import PluginError, SetupError
from recd_plugins.manager import PluginManager
from recd_plugins.plugin_modules import qualified

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from recd_plugins.planning.plan_mode import PlanQuestion
    from recd_plugins.planning.topologies import TopologySpec
    from recd_plugins.values.collective_rates import CollectiveRates


class Measurement(ABC):
    """A way to measure machines; the hook ``register_measurements`` adds it.

    A subclass is made without arguments, and travels to ranks by pickle. Its module imports neither
    torch nor torchrec at the top::

        class Ping(Measurement):
            def cluster(self, device):
                from acme.ping import ping_all_ranks

                return this_machine(4, nodes=2).model_copy(update=ping_all_ranks(device))
    """

    @abstractmethod
    def cluster(self, device: torch.device) -> TopologySpec:
        """What the ranks of this process group reach, the same on every rank. Collective.

        A run on several nodes that names no topology is planned for it, so it takes seconds and
        draws no random numbers.

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
        """What the stages of a registry's steps cost here, for ``recd plan --calibrate``.

        Args:
            question: what is planned after it.
            path: the topology file to write.

        Returns:
            The topology to plan for, and what was measured, for the terminal.

        Raises:
            RecdError: there is such a file already, or training does not go.
        """
        raise PluginError(f"{qualified(type(self))} measures no steps: it has no method steps")


def measurement(plugins_dir: Path | None = None) -> Measurement | None:
    """Return the way to measure machines that was registered last, files of plugins after packages.

    Raises:
        PluginError: a file of ``plugins_dir`` is broken.
    """
    found: list[type[Measurement]] = []
    PluginManager(plugins_dir).hand("register_measurements", lambda cls, _: found.append(cls))
    return found[-1]() if found else None


def needed_measurement(what: str, plugins_dir: Path | None = None) -> Measurement:
    """Likewise, for ``what`` cannot do without.

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
    """What collectives reach on ranks that are started here, on pretended nodes too, in seconds.

    Of a group of one rank it is what the call takes.

    Args:
        world_size: ranks.
        ranks_per_node: of them that count as a node.
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).

    Raises:
        SetupError: nothing that is installed measures machines, or this one does not allow it.
    """
    from recd_plugins.distributed.launch import backend_for, launch

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
    from recd_plugins.distributed.device import device_of_rank

    spec = measured_by.cluster(device_of_rank(device_type))
    if spec.collectives is None:
        raise PluginError(f"{qualified(type(measured_by))}.cluster measured no collectives")
    return spec.collectives
