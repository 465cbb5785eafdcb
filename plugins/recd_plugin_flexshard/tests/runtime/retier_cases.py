"""Training whose tiers follow a drifting distribution; what one rank sees of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from recd_plugin_flexshard.runtime.retier import RetierReport
from recd_plugin_flexshard.tests.runtime.state_model import (
    TIERS,
    Job,
    Optimizer,
    largest_difference,
    make_batch,
)
from recd_plugins.runtime.errors import ExactnessError

Loop = Literal["plain", "pipelined"]
EVERY = 3
STEPS = 18
DRIFT = 17


@dataclass(frozen=True)
class Drifted:
    """How training with tiers that move differs from one without tiers, and what they did.

    Attributes:
        loss: largest difference of a step's loss.
        everything: of weights and optimizer state after the last step.
        ahead: steps after which batches had been distributed by other tiers than the rows were in.
        reports: of the choices.
    """

    loss: float
    everything: float
    ahead: int
    reports: list[RetierReport]

    @property
    def moved(self) -> Counter[tuple[str, str]]:
        total = Counter[tuple[str, str]]()
        for report in self.reports:
            total.update(report.moved)
        return total


def drift(
    rank: int, world_size: int, optimizer: Optimizer, loop: Loop, evaluate: bool, save: bool
) -> Drifted:
    """With ``save``, read the state after every second step; with ``evaluate``, do after six."""
    moving, plain = Job(optimizer, TIERS, retier_every=EVERY), Job(optimizer, None)
    loss = difference = 0.0
    ahead = 0
    # A pipeline is empty before it evaluates.
    length = 6 if evaluate else STEPS
    for first in range(0, STEPS, length):
        batches, same = (
            iter([make_batch(rank, world_size, first + step, DRIFT) for step in range(length)])
            for _ in range(2)
        )
        for step in range(length):
            if loop == "pipelined":
                got, want = moving.pipeline.progress(batches), plain.pipeline.progress(same)
            else:
                got, want = moving.train_on(next(batches)), plain.train_on(next(same))
            loss = max(loss, float((got - want).abs()))
            ahead += moving.tiered.index is not moving.tiered._copies.index
            if save and step % 2:
                state = moving.everything()
                difference = max(difference, largest_difference(state, plain.everything()))
        if evaluate:
            got, want = (
                job.evaluate(first, pipelined=loop == "pipelined") for job in (moving, plain)
            )
            loss = max(loss, float((got - want).abs()))
    difference = max(difference, largest_difference(moving.everything(), plain.everything()))
    return Drifted(loss, difference, ahead, moving.tiered.retier_reports)


def look_up_in_any_order(rank: int, world_size: int) -> float:
    """Batches that were distributed by older and newer tiers, in turns; how wrong outputs are."""
    job, plain = Job("rowwise_adagrad", TIERS, retier_every=1), Job("rowwise_adagrad", None)
    job.train(range(1))
    plain.train(range(1))
    sharded, reference = job.tiered, plain.dmp.module.sequences
    batches = [make_batch(rank, world_size, step, DRIFT).ids for step in (1, 6, 12)]
    distributed = []
    for batch in batches:
        context = sharded.create_context()
        distributed.append((context, sharded.input_dist(context, batch).wait().wait()))
    assert len({id(context.split.index) for context, _ in distributed if context.split}) == 3
    difference = 0.0
    for number in (1, 0, 2, 0, 1):
        with torch.no_grad():
            got = sharded.compute_and_output_dist(*distributed[number])
            want = reference(batches[number])
            for name in ("f", "g", "h", "k"):
                apart = (got[name].values() - want[name].values()).abs()
                difference = max(difference, float(apart.sum()))
    return max(difference, largest_difference(job.everything(), plain.everything()))


def backward_after_rows_moved(rank: int, world_size: int) -> str:
    """What the backward pass of a batch says whose rows have moved since."""
    job = Job("sgd", TIERS, retier_every=1)
    first = job.dmp(make_batch(rank, world_size, 0))[0]
    job.dmp(make_batch(rank, world_size, 1))
    try:
        first.backward()
    except ExactnessError as error:
        return str(error)
    return ""
