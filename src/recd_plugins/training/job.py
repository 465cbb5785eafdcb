"""What a rank is to train, as it travels to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.registry import RunConfig
from recd_plugins.registry.from_file import load_registry
from recd_plugins.training.assembly import Side


@dataclass(frozen=True)
class Job:
    """What a rank is to do; travels to it by pickle.

    Attributes:
        registry: the registry file.
        side: with the registry's plugins, or the plain path that they are compared with.
        plugins_dir: a folder of plugin files.
        overrides: fields of the registry's ``training:`` section to set.
        device: ``cpu`` or ``cuda``.
        breakdown: profile some steps.
        sharding: a plugin in place of the first sharding entry's, as ``load_registry`` takes it.
        allowed: fields that may differ from those of the run that wrote the checkpoint.
        settings: values in place of the file's, as ``load_registry`` takes them.
        log_every: seconds between lines that say how far the run is; None for a live line where
            stderr is a terminal.
        topology: of the ranks, as they were measured; None for what the registry names.
        text: what the registry file held when the run began; None where the rank is to read it.
    """

    registry: Path
    side: Side = "plugins"
    plugins_dir: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    breakdown: bool = False
    sharding: str | None = None
    allowed: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    log_every: float | None = None
    topology: TopologySpec | None = None
    text: str | None = None

    def load(self) -> RunConfig:
        """The registry, with what the job sets."""
        read = load_registry(
            self.registry,
            plugins_dir=self.plugins_dir,
            sharding=self.sharding,
            settings=self.settings,
            text=self.text,
        )
        return read.with_training(self.overrides)

    @property
    def name(self) -> str:
        """Of the run, as errors have it: its file, and the side where that is not the file's."""
        plain = self.side == "plugins" and self.sharding is None
        return str(self.registry) if plain else f"{self.registry}, {self.sharding or self.side}"
