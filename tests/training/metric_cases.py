"""Metrics over batches of two ranks, for processes of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from recd_plugins import load_registry
from recd_plugins.runtime.errors import in_a_line
from recd_plugins.training.evaluation import Metrics

METRIC = """
from recd_plugins.api import Metric, PluginOptions, hookimpl

class Wrong(Metric):
    "The share of samples whose likelier label is wrong."
    name = "acme.wrong"

    class Options(PluginOptions):
        fault: str = ""

    def start(self):
        return [0, 0]

    def update(self, state, batch):
        wrong = (batch.predictions > 0.5) != (batch.labels > 0.5)
        batch.logits.zero_()
        state[0], state[1] = state[0] + int(wrong.sum()), state[1] + len(wrong)
        return state

    def results(self, states):
        if self.options.fault == "results":
            return 1 / 0
        wrong, seen = map(sum, zip(*states))
        name = "log_loss" if self.options.fault == "taken" else "error_rate"
        return {name: wrong / seen}

@hookimpl
def register_plugins():
    return [Wrong]
"""


def results(
    rank: int, world_size: int, path: Path, faults: Sequence[str], num_batches: int
) -> list[dict[str, float] | str]:
    """What the metrics of ``{fault}.yaml`` give, or the error; the last rank sees no sample."""
    found: list[dict[str, float] | str] = []
    for fault in faults:
        registry = load_registry(path / f"{fault}.yaml", plugins_dir=path / "plugins")
        try:
            metrics = Metrics(registry.path, registry.entries("metric"))
            for step in range(num_batches if rank < world_size - 1 else 0):
                logits = torch.tensor([-1.0, 1.0, 2.0, -2.0])
                metrics.update(logits, torch.tensor([0.0, 1.0, 0.0, float(step == 0)]))
            found.append(metrics.results())
        except Exception as error:
            found.append(in_a_line(error))
    return found
