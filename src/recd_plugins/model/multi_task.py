"""Layers of multi-task models after the interaction: shared bottom, MMoE and PLE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP

from recd_plugins.config.schema import ModelSpec, MultiTaskSpec
from recd_plugins.interfaces.tasks import Task
from recd_plugins.model.split_input import SplitInput, run_linear, run_mlp


class MultiTaskArch(nn.Module):
    """Maps the interaction to one logit per task, with a tower MLP per task.

    Args:
        spec: ``multi_task`` has the shared layers' kind and tower sizes, ``top_mlp`` other sizes.
        in_features: width of the interaction.
        tasks: the T tasks.
    """

    def __init__(self, spec: ModelSpec, in_features: int, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        options = spec.multi_task or MultiTaskSpec()
        self.shared: SharedBottom | MixtureOfExperts | ExtractionLayers
        if options.kind == "shared":
            self.shared = SharedBottom(in_features, spec.top_mlp, len(tasks))
        elif options.kind == "mmoe":
            self.shared = MixtureOfExperts(in_features, spec.top_mlp, len(tasks), options.experts)
        else:
            self.shared = ExtractionLayers(in_features, spec.top_mlp, len(tasks), options)
        width = _width(in_features, spec.top_mlp)
        self.towers = nn.ModuleList(_tower(width, options.tower_mlp) for _ in tasks)

    def forward(self, interactions: Tensor | SplitInput) -> Tensor:
        """Map ``[B, in_features]`` to logits ``[B, T]``."""
        inputs = self.shared(interactions)
        logits = [tower(each) for tower, each in zip(self.towers, inputs, strict=True)]
        return torch.cat(logits, dim=1)

    def start_at(self, means: Mapping[str, float]) -> None:
        """Set the last bias of each tower so that its initial prediction is the mean target."""
        for task, tower in zip(self.tasks, self.towers, strict=True):
            mean = means.get(task.name, math.nan)
            if not task.is_regression:
                mean = math.log(mean / (1 - mean)) if 0 < mean < 1 else math.nan
            if math.isfinite(mean):
                assert isinstance(tower, nn.Sequential)
                last = tower[-1]
                assert isinstance(last, nn.Linear)
                nn.init.constant_(last.bias, mean)


def num_first_layers(spec: ModelSpec, num_tasks: int) -> int:
    """Return the number of MLPs that read the interaction."""
    options = spec.multi_task or MultiTaskSpec()
    if options.kind == "shared":
        return 1
    of_tasks = num_tasks * options.task_experts if options.kind == "ple" else 0
    return options.experts + of_tasks


class SharedBottom(nn.Module):
    """Returns the output of one MLP for each task."""

    def __init__(self, in_features: int, sizes: Sequence[int], num_tasks: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.bottom = _mlp(in_features, sizes)

    def forward(self, inputs: Tensor | SplitInput) -> list[Tensor]:
        """Map ``[B, in_features]`` to one tensor ``[B, width]`` per task."""
        return [run_mlp(self.bottom, inputs)] * self.num_tasks


class Experts(nn.Module):
    """Several MLPs with the same input."""

    def __init__(self, in_features: int, sizes: Sequence[int], num_experts: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(_mlp(in_features, sizes) for _ in range(num_experts))

    def forward(self, inputs: Tensor | SplitInput) -> Tensor:
        """Map ``[B, in_features]`` to ``[B, num_experts, width]``."""
        return torch.stack([run_mlp(mlp, inputs) for mlp in self.mlps], dim=1)


class MixtureOfExperts(nn.Module):
    """Multi-gate mixture of experts (MMoE, Ma et al. 2018, section 4): a softmax gate per task."""

    def __init__(
        self, in_features: int, sizes: Sequence[int], num_tasks: int, num_experts: int
    ) -> None:
        super().__init__()
        self.experts = Experts(in_features, sizes, num_experts)
        self.gates = nn.ModuleList(nn.Linear(in_features, num_experts) for _ in range(num_tasks))

    def forward(self, inputs: Tensor | SplitInput) -> list[Tensor]:
        """Map ``[B, in_features]`` to one tensor ``[B, width]`` per task."""
        outputs = self.experts(inputs)
        return [_mixed(run_linear(gate, inputs), outputs) for gate in self.gates]


class ExtractionLayers(nn.Module):
    """Progressive layered extraction (PLE, Tang et al. 2020, section 4).

    Each layer has shared experts, and experts of each task. The gate of a task mixes the experts of
    this task and the shared experts. All but the last layer also have a shared gate, which mixes
    all experts.
    """

    def __init__(
        self, in_features: int, sizes: Sequence[int], num_tasks: int, options: MultiTaskSpec
    ) -> None:
        super().__init__()
        counts = [options.task_experts] * num_tasks + [options.experts]
        self.experts, self.gates = nn.ModuleList(), nn.ModuleList()
        width = in_features
        for layer in range(options.layers):
            self.experts.append(nn.ModuleList(Experts(width, sizes, each) for each in counts))
            mixed = [options.task_experts + options.experts] * num_tasks
            if layer < options.layers - 1:
                mixed.append(sum(counts))
            self.gates.append(nn.ModuleList(nn.Linear(width, count) for count in mixed))
            width = _width(width, sizes)
        self.num_tasks = num_tasks

    def forward(self, inputs: Tensor | SplitInput) -> list[Tensor]:
        """Map ``[B, in_features]`` to one tensor ``[B, width]`` per task."""
        # One state per task, then the shared state.
        states: list[Any] = [inputs] * (self.num_tasks + 1)
        for experts, gates in zip(self.experts, self.gates, strict=True):
            assert isinstance(experts, nn.ModuleList)
            assert isinstance(gates, nn.ModuleList)
            outputs = [part(state) for part, state in zip(experts, states, strict=True)]
            mixed = [torch.cat([own, outputs[-1]], dim=1) for own in outputs[:-1]]
            mixed.append(torch.cat(outputs, dim=1))
            # The last layer has no shared gate.
            states = [
                _mixed(run_linear(gate, state), of_gate)
                for gate, state, of_gate in zip(gates, states, mixed, strict=False)
            ]
        return states


def _mixed(gate: Tensor, outputs: Tensor) -> Tensor:
    """Return the sum of expert outputs ``[B, E, width]``, weighted by gate logits ``[B, E]``."""
    weighted: Tensor = torch.bmm(gate.softmax(dim=1).unsqueeze(1), outputs)
    return weighted.squeeze(1)


def _mlp(in_features: int, sizes: Sequence[int]) -> nn.Module:
    return MLP(in_features, list(sizes), bias=True, activation="relu")


def _tower(in_features: int, sizes: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(_mlp(in_features, sizes), nn.Linear(_width(in_features, sizes), 1))


def _width(in_features: int, sizes: Sequence[int]) -> int:
    return sizes[-1] if sizes else in_features
