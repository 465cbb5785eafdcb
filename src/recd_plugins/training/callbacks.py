"""Calls the callback plugins of a run, which observe training, on one rank."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.interfaces import Split, Table
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.callback import (
    Callback,
    RunBatch,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.generators import generators_kept
from recd_plugins.runtime.rank_agreement import together
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.evaluation import Measured


@dataclass(frozen=True)
class Called:
    """A callback entry, its key in checkpoints, and the features or tables of its patterns."""

    entry: Entry[Callback]
    key: str
    claimed: tuple[str, ...]


def callbacks_of(registry: RunConfig, tables: Iterable[Table]) -> list[Called]:
    """Return the callback plugins of a run config in the order of the file."""
    schema = registry.dataset.schema()
    names = {
        "feature": (*schema.sparse, *schema.dense),
        "table": tuple(table.name for table in tables),
    }
    found: list[tuple[Entry[Callback], tuple[str, ...]]] = []
    for kind in registry.kinds.values():
        matched = names[kind.claimed] if kind.claimed else ()
        if kind.claimed and kind.name in registry.further:
            registry.claim(kind.name, matched)  # for its errors; nobody else may ask
        wrappers = registry.wrappers if kind.name == "dataset" else ()
        for entry in (*registry.entries(kind.name), *wrappers):
            if isinstance(entry.plugin, Callback):
                found.append((entry, tuple(filter(entry.matches, matched))))
    count = Counter(entry.plugin.name for entry, _ in found)
    called: dict[str, Called] = {}
    for entry, claimed in found:
        key = entry.plugin.name if count[entry.plugin.name] == 1 else _key_of_several(entry)
        while key in called:  # an equal entry
            key += "'"
        called[key] = Called(entry, key, claimed)
    return list(called.values())


def _key_of_several(entry: Entry[Callback]) -> str:
    """Return a checkpoint key that depends on plugin and options, not on the entry's position."""
    options = entry.plugin.options.model_dump(mode="json")
    said = json.dumps([options, entry.patterns], sort_keys=True)
    return f"{entry.plugin.name}#{hashlib.sha256(said.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run on one rank, in the order in which they are called."""

    #: The registry file.
    path: Path
    called: Sequence[Called]
    rank: int
    world_size: int
    #: Rows per step, summed over ranks.
    step_samples: int = 0
    #: Overrides of the registry file, and its text.
    settings: Sequence[str] = ()
    text: str = ""
    config: RunConfig | None = None
    _in_flight: deque[ModelInput] = field(default_factory=deque, init=False)

    def start(
        self,
        progress: Progress,
        expected_steps: int,
        tables: Sequence[Table],
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Call ``on_start``, and restore the callbacks' states from ``progress``."""
        gone = set(progress.callbacks)
        for each in self.called:
            start = RunStart(
                rank=self.rank,
                world_size=self.world_size,
                step=progress.step,
                expected_steps=expected_steps,
                tables=tuple(tables),
                claimed=each.claimed,
                step_samples=self.step_samples,
                registry=self.text,
                settings=tuple(self.settings),
                model=model,
                optimizer=optimizer,
                config=self.config,
            )
            self._call(each, "on_start", start)
            # One that is alone now may have been one of several.
            for key in (each.key, _key_of_several(each.entry)):
                if key in gone:
                    gone.discard(key)
                    self._call(each, "load_state_dict", progress.callbacks[key])
                    break
        if gone and self.rank == 0:
            names = ", ".join(sorted({repr(key.partition("#")[0]) for key in gone}))
            click.echo(
                f"The saved state of {names} is ignored, because the registry file does not use "
                "this callback",
                err=True,
            )

    def queued(self, batch: ModelInput) -> ModelInput:
        """Return the batch; queue it for ``trained`` if a callback implements ``on_batch``."""
        if any(_overrides(each, "on_batch") for each in self.called):
            self._in_flight.append(batch)
        return batch

    def trained(self, step: int, loss: Tensor, learning_rate: float | None = None) -> None:
        """Call ``on_batch`` with the oldest queued batch, then call ``on_step``."""
        if self._in_flight:
            self._call_all("on_batch", RunBatch(self.rank, step, self._in_flight.popleft()))
        if any(_overrides(each, "on_step") for each in self.called):
            context = RunStep(self.rank, step, loss.detach().clone(), learning_rate)
            self._call_all("on_step", context)

    def evaluated(self, step: int, split: Split, measured: Measured) -> None:
        """Call ``on_evaluate`` if the evaluation has results."""
        quality, metrics = measured
        if quality is not None:
            evaluation = RunEvaluation(self.rank, step, split, quality, metrics)
            self._call_all("on_evaluate", evaluation)

    def interrupted(self, step: int, by: str) -> None:
        self._call_all("on_interrupt", RunInterruption(self.rank, step, by))

    def ended(self, step: int, losses: Sequence[float]) -> None:
        self._call_all("on_end", RunEnd(self.rank, step, tuple(losses)))

    def states(self) -> dict[str, list[dict[str, Any]]]:
        """Return a dict from callback key to its states, one per rank. All ranks must call this."""
        with_state = [each for each in self.called if _overrides(each, "state_dict")]
        if not with_state:
            return {}
        ranks = together(lambda: [self._call(each, "state_dict") for each in with_state])
        by_key = {each.key: [of[i] for of in ranks] for i, each in enumerate(with_state)}
        return {key: states for key, states in by_key.items() if any(states)}

    def _call_all(self, method: str, context: object) -> None:
        for each in self.called:
            if _overrides(each, method):
                self._call(each, method, context)

    def _call(self, called: Called, method: str, *arguments: object) -> Any:
        plugin = called.entry.plugin
        # A callback's random draws and grad mode must not change training.
        with (
            at_entry(self.path, called.entry),
            plugin_call(plugin, method),
            generators_kept(),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            return getattr(plugin, method)(*arguments)


def _overrides(called: Called, method: str) -> bool:
    return getattr(type(called.entry.plugin), method) is not getattr(Callback, method)
