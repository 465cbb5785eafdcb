"""What a feed leaves to the next one of its process: Ray and its readers take seconds to start."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize

from recd_plugin_dsi.cluster import RayCluster, agreed
from recd_plugin_dsi.helper import Helper
from recd_plugin_dsi.options import RayOptions


@dataclass(frozen=True)
class Standby:
    """A cluster, and a process that speaks to it and reads nothing.

    Attributes:
        place: what they were started with and cannot be told anew; see ``place_of``.
    """

    place: tuple[object, ...]
    cluster: RayCluster
    feeder: Helper

    @property
    def alive(self) -> bool:
        """Whether its processes are there."""
        host = self.cluster.host
        return self.feeder.alive and (host is None or host.alive)

    def end(self) -> None:
        """End what it is of."""
        self.feeder.end()
        self.cluster.leave()


# None, or the one.
_kept: list[Standby] = []


def place_of(options: RayOptions, world_size: int) -> tuple[object, ...]:
    """Where readers run and what they see there, of a rank."""
    own: tuple[object, ...] = ()
    if options.address is None:
        own = (options.cpus, options.memory_bytes, world_size, dict(os.environ))
    seen = (os.getpid(), os.getcwd(), tuple(sys.path))
    return (options.address, options.deaths, *seen, *own)


def keep(standby: Standby) -> bool:
    """Keep it until it is taken, or the process ends; False where another is kept."""
    if _kept or not standby.alive:
        return False
    _kept.append(standby)
    # Ranks are processes of multiprocessing, which do not run what ``atexit`` was told.
    Finalize(None, end_kept, exitpriority=0)
    return True


def take(options: RayOptions, world_size: int) -> Standby | None:
    """The one that is kept, if it fits; else it is ended.

    Without an address a collective call, where there is a process group: all ranks have one, or
    none has.
    """
    place = place_of(options, world_size)
    fits = bool(_kept) and _kept[0].place == place and _kept[0].alive
    if options.address is None:
        fits = agreed(fits)
    if not fits:
        end_kept()
        return None
    standby = _kept.pop()
    if options.address is not None:
        return replace(standby, cluster=replace(standby.cluster, ranks=world_size))
    return standby


def end_kept() -> None:
    """End what is kept, if something is."""
    while _kept:
        standby = _kept.pop()
        if os.getpid() in standby.place:  # else a parent's, and not this process's to end
            standby.end()
