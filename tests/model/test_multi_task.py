"""Losses of tasks with missing labels, and the layers of multi-task models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from recd_plugins.config.schema import ModelSpec
from recd_plugins.interfaces.tasks import Task, total_loss
from recd_plugins.model.multi_task import MixtureOfExperts, MultiTaskArch
from recd_plugins.training.quality import measure, measure_tasks

TASKS = (
    Task("click", weight=2.0),
    Task("stars", "regression", loss="mse"),
    Task("minutes", "regression", 0.1, "log_mse"),
    Task("watch", "weighted"),
)
NAN = math.nan
LABELS = torch.tensor(
    [[1, 3, 9, 5], [NAN, 1, NAN, 0], [0, NAN, 1, NAN], [1, 2, 0, 0.5], [0, 2, 3, 0]]
)


def test_missing_labels_have_no_loss_and_no_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4, requires_grad=True)
    loss = total_loss(TASKS, logits, LABELS)
    loss.backward()
    columns = zip(logits.detach().unbind(1), LABELS.unbind(1), strict=True)
    click, stars, minutes, (x, y) = ((x[~y.isnan()], y[~y.isnan()]) for x, y in columns)
    weights = torch.where(y > 0, y, 1.0)
    expected = [
        2 * F.binary_cross_entropy_with_logits(*click),
        F.mse_loss(*stars),
        0.1 * F.mse_loss(minutes[0], minutes[1].log1p()),
        F.binary_cross_entropy_with_logits(x, (y > 0).float(), weights),
    ]
    torch.testing.assert_close(loss.detach(), sum(expected))
    assert logits.grad is not None
    assert torch.equal(logits.grad == 0, LABELS.isnan())
    # No row of the batch has a label.
    nothing = total_loss(TASKS, logits, torch.full((5, 4), NAN))
    assert float(nothing) == 0


def test_quality_of_each_task() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4).double()
    quality = measure_tasks(TASKS, logits, LABELS.double())
    figures = quality.figures()
    known = ~LABELS[:, 0].isnan()
    alone = measure(logits[known, 0], LABELS[known, 0].double())
    assert figures["num_samples"] == 5
    assert figures["click.num_samples"] == 4
    assert figures["click.auc"] == alone.auc
    assert figures["click.log_loss"] == alone.log_loss
    assert figures["loss"] == pytest.approx(float(total_loss(TASKS, logits, LABELS.double())))
    errors = logits[:, 1] - LABELS[:, 1]
    rmse = float(errors[~errors.isnan()].square().mean()) ** 0.5
    assert figures["stars.rmse"] == pytest.approx(rmse)
    values = logits[:, 2].expm1() - LABELS[:, 2]
    assert figures["minutes.mae"] == pytest.approx(float(values[~values.isnan()].abs().mean()))
    assert "stars.auc" not in figures
    assert TASKS[3].predictions(logits[:, 3]).tolist() == logits[:, 3].exp().tolist()
    # The calibration of a weighted task compares weighted probabilities with the weights.
    x, y = logits[:, 3], LABELS[:, 3].double()
    x, y = x[~y.isnan()], y[~y.isnan()]
    weights = torch.where(y > 0, y, 1.0)
    ratio = (weights * x.sigmoid()).sum() / y.sum()
    assert figures["watch.calibration"] == pytest.approx(float(ratio))


@pytest.mark.parametrize(
    "options",
    [
        None,
        {"kind": "mmoe", "experts": 3},
        {"kind": "ple", "experts": 2, "task_experts": 1, "layers": 2, "tower_mlp": []},
    ],
)
def test_each_logit_trains_its_own_layers(options: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    spec = ModelSpec.model_validate({"top_mlp": [8, 6], "multi_task": options})
    arch = MultiTaskArch(spec, 5, TASKS)
    arch.start_at({"click": 0.25, "stars": 3.0, "watch": 1.0})
    last = [tower[-1].bias.item() for tower in arch.towers]  # type: ignore[index]
    assert last[:2] == pytest.approx([math.log(1 / 3), 3.0])
    inputs = torch.randn(7, 5)
    logits = arch(inputs)
    assert logits.shape == (7, 4)
    trained = []
    for n in range(4):
        arch.zero_grad()
        arch(inputs)[:, n].sum().backward()
        trained.append({name for name, p in arch.named_parameters() if p.grad.any()})
    assert set().union(*trained) == {name for name, _ in arch.named_parameters()}
    of_click = {name for name in trained[0] if all(name not in of for of in trained[1:])}
    assert {name for name in of_click if name.startswith("towers.0.")}
    assert all(name.startswith("towers.0.") for name in of_click) == (options is None)


def test_mmoe_mixes_experts_by_the_gate_of_each_task() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(5, [4], num_tasks=2, num_experts=3)
    inputs = torch.randn(7, 5)
    for gate, mixed in zip(layer.gates, layer(inputs), strict=True):
        shares = gate(inputs).softmax(1)
        expected = sum(
            shares[:, n, None] * expert(inputs) for n, expert in enumerate(layer.experts.mlps)
        )
        torch.testing.assert_close(mixed, expected)


def test_options_of_another_kind_are_refused() -> None:
    for options in ({"experts": 2}, {"kind": "mmoe", "layers": 2}):
        with pytest.raises(ValueError, match=r"does not apply to model.multi_task.kind"):
            ModelSpec.model_validate({"multi_task": options})
