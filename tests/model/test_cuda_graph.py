"""Layers replayed as CUDA graphs train like layers without graphs."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recd_plugins.model import cuda_graph, stored_gradients
from recd_plugins.model.cuda_graph import GraphedLoss
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.fake_cuda import fake_cuda, host_counts


class Layers(nn.Module):
    def __init__(self, graphed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.graphed = GraphedLoss() if graphed else None

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (self.graphed or (lambda _, f, *inputs: f(*inputs)))(
            self, self.loss, features, labels
        )

    def loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(features).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels), logits.detach()


def inputs(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size)
    features = torch.randn(size, 4).to(device).requires_grad_()
    return features, torch.rand(size).to(device)


def trained(
    graphed: bool, device: torch.device, stored: bool = False
) -> tuple[list[list[float]], list[float]]:
    """Return results of each step, and the launches of each step."""
    model = Layers(graphed).to(device)
    if stored:
        stored_gradients.allow(model.parameters())
    results: list[list[Tensor]] = []
    launches = []
    for step, size in enumerate((8, 8, 8, 8, 3, 8, 8)):
        features, labels = inputs(size, device)
        with host_counts() as counts:
            loss, logits = model(features, labels)
            (2 * loss).backward()
            assert features.grad is not None
            found = [loss.detach(), logits, features.grad.clone()]
            if step == 5:  # accumulates the gradients of two batches
                model(*inputs(size, device))[0].backward()
        launches.append(counts.by_phase("launch")["all"])
        with torch.no_grad():
            for each in model.parameters():
                assert each.grad is not None
                found.append(each.grad.clone())
                each.sub_(each.grad, alpha=0.1)
                each.grad = None
        results.append(found)
    return [torch.cat([each.flatten() for each in step]).tolist() for step in results], launches


def check_training(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        expected, eager_launches = trained(False, device)
        results, launches = trained(True, device)
        stored = trained(True, device, stored=True)
    assert stored == (results, launches)
    for found, wanted in zip(results, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)
    assert (launches[0], launches[4]) == (eager_launches[0], eager_launches[4])
    assert launches[2] == launches[3] == launches[6] < eager_launches[2] - 5


def test_graphs_train_like_eager_layers() -> None:
    launch(check_training, 1)


def check_limits(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        model = Layers(True).to(device)

        def graphs() -> float:
            with host_counts() as counts:
                model(*inputs(8, device))[0].backward()
            return sum(n for event, n in counts.items() if event.kind == "graph")

        assert [graphs() for _ in range(3)] == [0, 4, 2]  # the capture is compared with eager
        assert copy.deepcopy(model).graphed is not model.graphed
        with torch.no_grad():
            model(*inputs(8, device))
        first = model(*inputs(8, device))[0]
        model(*inputs(8, device))
        with pytest.raises(RuntimeError, match="another forward pass before this backward"):
            first.backward()
        hook = model.layers[0].register_forward_hook(lambda *_: None)
        assert graphs() == 0
        hook.remove()
        assert graphs() == 2
        model.layers[0].bias.requires_grad = False
        assert [graphs() for _ in range(2)] == [0, 4]


def test_other_calls_run_without_graphs() -> None:
    launch(check_limits, 1)


class Waits(Layers):
    def loss(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().loss(features, labels)
        return loss * (1 if loss.item() > 0 else 2), logits


def check_layers_that_wait(rank: int, world_size: int) -> None:
    with fake_cuda() as device, patch.object(cuda_graph.logger, "warning") as warned:
        model = Waits(True).to(device)
        losses = [model(*inputs(8, device))[0] for _ in range(3)]
        losses[-1].backward()
        assert losses[0].item() == losses[1].item() == losses[2].item()
    warned.assert_called_once()
    assert "the capture failed" in warned.call_args.args[1]


def test_layers_that_cannot_be_captured_run_without_graphs() -> None:
    launch(check_layers_that_wait, 1)


def check_capture(rank: int, world_size: int) -> None:
    with fake_cuda() as device:
        graph, values = torch.cuda.CUDAGraph(), torch.ones(3).to(device)
        with torch.cuda.graph(graph):
            doubled = values * 2
            values += 1
        values.fill_(5)
        graph.replay()
        assert doubled.tolist() == [10] * 3
        with pytest.raises(RuntimeError, match="waits for the device"), torch.cuda.graph(graph):
            values.sum().item()


def test_the_fake_device_replays_graphs() -> None:
    launch(check_capture, 1)
