"""Metrics of a registry file: what they make of the predictions of all ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
import torch.distributed as dist
from torch import Tensor

from recd_plugins.errors import PluginError, Problem, RegistryError
from recd_plugins.interfaces import Metric, ScoredBatch, Split
from recd_plugins.interfaces.callback import Quality
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig, at_entry
from recd_plugins.training.agreement import together

T = TypeVar("T")

# Calibration a metric may measure, as TorchRec's does: that is the one shown then.
_OF_QUALITY = {field.name for field in fields(Quality)} - {"calibration"}


def check_metrics(registry: RunConfig, splits: Sequence[Split]) -> None:
    """Refuse metrics that would measure nothing.

    Args:
        registry: its metric entries.
        splits: that a run reads.

    Raises:
        RegistryError: there are some and no test split; names the line of each.
    """
    if "test" in splits:
        return
    why = (
        "training.evaluate is false"
        if not registry.training.evaluate
        else f"{registry.dataset.name} has no test split"
    )
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            entry.field,
            f"{entry.plugin.name} measures the test split, and {why}: set enabled: false here, or "
            "evaluate one",
        )
        for entry in registry.entries("metric")
    ]
    if problems:
        raise RegistryError(problems)


class Metrics:
    """The metrics of one evaluated split on one rank.

    Args:
        path: of the registry file, for errors.
        entries: of the metrics.
    """

    def __init__(self, path: Path, entries: Sequence[Entry[Metric]]) -> None:
        self._path = path
        self._entries = tuple(entries)
        self._states = [self._call(entry, "start", _start, entry.plugin) for entry in self._entries]
        self._num_samples = 0

    def update(self, logits: Tensor, labels: Tensor, sessions: Tensor | None = None) -> None:
        """Show all of them a batch, logits, labels and sessions ``[B]``."""
        self._num_samples += len(labels)
        for i, entry in enumerate(self._entries):
            # Copies: what one does to them no other sees.
            batch = ScoredBatch(
                logits.detach().cpu().float().clone(),
                labels.detach().cpu().float().clone(),
                None if sessions is None else sessions.clone(),
            )
            state = self._states[i]
            self._states[i] = self._call(entry, "update", entry.plugin.update, state, batch)

    def results(self) -> dict[str, float]:
        """Figures over the samples of all ranks by name, on every rank; empty without a sample.

        A collective call. Rank 0 says on stderr which are not finite.

        Raises:
            PluginError: a plugin returns what is no figure, two have figures of one name, or a
                state cannot travel to rank 0.
        """
        if not self._entries:
            return {}
        mine: tuple[int, list[bytes]] | Exception
        try:
            mine = (self._num_samples, list(map(self._pickled, self._entries, self._states)))
        except Exception as error:
            mine = error
        first = dist.get_rank() == 0
        everyone: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(mine, everyone)
        return together(lambda: {} if everyone is None else self._of_all(everyone))[0]

    def _pickled(self, entry: Entry[Metric], state: Any) -> bytes:
        return self._call(entry, "sending a state to rank 0", pickle.dumps, state)

    def _of_all(self, told: Sequence[tuple[int, list[bytes]] | Exception]) -> dict[str, float]:
        ranks = []
        for each in told:
            if isinstance(each, Exception):
                raise each
            ranks.append(each)
        found: dict[str, float] = {}
        named_by: dict[str, Entry[Metric]] = {}
        if not any(num_samples for num_samples, _ in ranks):
            return found
        for i, entry in enumerate(self._entries):
            states = [pickle.loads(states[i]) for _, states in ranks]
            results = self._call(entry, "results", entry.plugin.results, states)
            where = f"{self._path}:{entry.line} {entry.field}"
            for name, value in _checked(entry.plugin, results).items():
                other = named_by.setdefault(name, entry)
                if other is not entry or name in _OF_QUALITY:
                    has = f"{other.plugin.name} ({other.field}, line {other.line})"
                    raise PluginError(
                        f"{where}: {entry.plugin.name} has a result {name}, as "
                        f"{has if other is not entry else 'every run'} has: leave one out, or give "
                        "it another name"
                    )
                if not math.isfinite(value):
                    click.echo(f"{where}: {entry.plugin.name}: {name} is {value}", err=True)
                found[name] = value
        return found

    def _call(
        self, entry: Entry[Metric], what: str, method: Callable[..., T], *arguments: Any
    ) -> T:
        with at_entry(self._path, entry), plugin_call(entry.plugin, what):
            return method(*arguments)


def _start(plugin: Metric) -> Any:
    """A copy of the first state: one object that a plugin hands out again adds up evaluations."""
    return deepcopy(plugin.start())


def _checked(plugin: Metric, results: object) -> Mapping[str, float]:
    if not isinstance(results, Mapping):
        raise PluginError(f"{plugin.title}: results returned {results!r:.200}; expected a mapping")
    if not results:
        raise PluginError(f"{plugin.title}: results have no figure; one that has no value is NaN")
    for name, value in results.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise PluginError(
                f"{plugin.title}: results have the name {name!r:.200}; expected a word as in "
                "'calibration'"
            )
        if isinstance(value, bool) or not isinstance(value, float | int):
            raise PluginError(
                f"{plugin.title}: results have {name} {value!r:.200}; expected a float"
            )
    return {name: float(value) for name, value in results.items()}
