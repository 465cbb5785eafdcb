"""Training with tiers is training without: loss, outputs and weights agree after six steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.covering import cells_of_today, of_today
from tests.distributed.parity_cases import from_rank_0
from tests.distributed.parity_model import DIM, ReferenceOptimizer
from torch import Tensor
from torchrec.distributed.types import ShardedModule

from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugin_flexshard.tests.runtime.model import (
    COPIES,
    EPS,
    FEATURES,
    OPTIMIZERS,
    RATES,
    TIERS,
    Form,
    Job,
    Optimizer,
    TierModel,
    model_input,
)
from recd_plugins.runtime.launch import CUDA_BACKEND, launch
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.wire import SCALE_BYTES
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

STEPS = 6
TOLERANCE = 1e-6
# Ranks, and ranks of a node.
CLUSTERS = {"2x1": (2, 1), "1x2": (2, 2), "2x2": (4, 2), "3x2": (6, 2)}


@dataclass(frozen=True)
class Case:
    tiers: str
    optimizer: Optimizer
    pipelined: bool
    form: Form
    sparse: tuple[CopyTier, ...] = ()
    untiered: str = "row_wise"
    device_type: str = DEVICE.type
    coalesced: tuple[str, ...] = ()
    wire: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    sends_all: bool = False

    def job(self) -> Job:
        device = torch.device("cpu")
        if self.device_type == "cuda":
            device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        tiers = TIERS[self.tiers]
        return Job(
            self.optimizer,
            tiers,
            sparse=self.sparse,
            shardings={table: self.untiered for table in FEATURES if table not in tiers},
            wire=self.wire,
            coalesced=self.coalesced,
            sends_all=self.sends_all,
            device=device,
        )


@dataclass(frozen=True)
class Difference:
    loss: float
    output: float
    weight: float
    moved: float
    apart: float
    pipelines_all: bool
    sent: dict[str, int]


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Difference]:
    return [_run(rank, world_size, case) for case in cases]


def _run(rank: int, world_size: int, case: Case) -> Difference:
    initial = TierModel(None).state_dict()
    job = case.job()
    groups = job.tiered.groups
    batches = [model_input(rank, step, case.form) for step in range(STEPS)]
    with CollectiveBytes() as counter:
        outputs = job.train_on(batches, pipelined=case.pipelined)
    expected, trained = _reference(case.optimizer, world_size)
    weights = job.weights()
    assert weights.keys() == initial.keys()
    pairs = [(got, want[rank]) for got, want in zip(outputs, expected, strict=True)]
    sent = dict.fromkeys(groups.names.values(), 0)
    for traffic, num_bytes in counter.sent.items():
        if traffic.payload == "floats" and traffic.group in groups.names:
            sent[groups.names[traffic.group]] += num_bytes
    num_modules = sum(isinstance(module, ShardedModule) for module in job.dmp.modules())
    return Difference(
        loss=max(abs(float(got[0].cpu() - want[0])) for got, want in pairs),
        output=max(float((got[1].cpu() - want[1]).abs().max()) for got, want in pairs),
        weight=max(float((weights[name] - trained[name]).abs().max()) for name in weights),
        moved=min(float((trained[name] - initial[name]).abs().max()) for name in weights),
        apart=_apart(job),
        pipelines_all=len(job.pipeline._pipelined_modules) == num_modules,
        sent=sent,
    )


def _apart(job: Job) -> float:
    module, found = job.tiered, 0.0
    groups = module.groups
    for overlay, group in ((module.hot, groups.hot), (module.flex, groups.flex_gradients)):
        copies = [torch.empty_like(overlay.weights) for _ in range(group.size())]
        dist.all_gather(copies, overlay.weights, group=group)
        differences = torch.stack(copies) - overlay.weights
        found = max(found, float(differences.abs().max()) if differences.numel() else 0.0)
    return found


Trained = tuple[list[list[tuple[Tensor, Tensor]]], dict[str, Tensor]]


@cache
def _reference(optimizer: Optimizer, world_size: int) -> Trained:
    return from_rank_0(lambda: _train_reference(optimizer, world_size))


def _train_reference(name: Optimizer, world_size: int) -> Trained:
    model = TierModel(None)
    optimizer = ReferenceOptimizer(model, set(FEATURES), name, RATES[name], EPS, {})
    outputs = []
    for step in range(STEPS):
        results = [model(model_input(each, step, "kjt")) for each in range(world_size)]
        torch.stack([loss for loss, _ in results]).mean().backward()
        optimizer.step()
        outputs.append([(loss.detach(), output.detach()) for _, (loss, output) in results])
    return outputs, model.state_dict()


FORMS: tuple[Form, ...] = ("kjt", "ikjt")
SYNCS: tuple[tuple[CopyTier, ...], ...] = ((), COPIES)
AXES = (("two", "three"), OPTIMIZERS, (False, True), FORMS, SYNCS)
MATRIX = [Case(*cell) for cell in product(*AXES)]
ODD_TIERS = [
    Case(tiers, "rowwise_adagrad", pipelined, "ikjt", COPIES if pipelined else ())
    for tiers, pipelined in product(("flex", "all", "few", "empty"), (False, True))
]
UNTIERED = [
    Case("three", "sgd", True, "kjt", untiered=sharding)
    for sharding in ("table_wise", "column_wise", "data_parallel")
]
# All tables, or those with tiers.
COALESCED = [
    replace(case, coalesced=tuple(FEATURES) if case.pipelined else ("a", "b", "d"))
    for case in (*MATRIX, *ODD_TIERS)
    if case.tiers in ("three", "all", "empty") and case.optimizer == "rowwise_adagrad"
]


@pytest.mark.parametrize("cluster", ["2x1", "1x2", "2x2", "3x2"])
def test_parity(cluster: str) -> None:
    today = cells_of_today(list(product(CLUSTERS, *AXES)))
    _check([Case(*cell[1:]) for cell in today if cell[0] == cluster], cluster)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("cases", [ODD_TIERS, COALESCED], ids=["odd tiers", "coalesced"])
def test_parity_of_other_tables(cases: list[Case], turn: int) -> None:
    _check(list(of_today(cases, 3, turn)), ("2x1", "2x2")[turn])


@pytest.mark.parametrize("cluster", ["1x2", "2x2"])
def test_parity_beside_tables_without_tiers(cluster: str) -> None:
    _check(UNTIERED, cluster)


def test_formats_of_fewer_bits_round_and_save() -> None:
    exact = Case("three", "sgd", True, "ikjt", COPIES, coalesced=tuple(FEATURES), sends_all=True)
    cases = [
        exact,
        replace(exact, wire="fp16"),
        replace(exact, wire="bf16", pipelined=False),
        replace(exact, wire="int8"),
        replace(exact, wire="fp16", sends_all=False),
    ]
    for by_case in run_on_ranks(run_cases, 4, cases, local_world_size=2):
        fp32, fp16, bf16, int8, once = by_case
        assert (once.weight, once.apart) == (fp16.weight, 0)
        assert once.sent["cold"] != fp16.sent["cold"]
        assert TOLERANCE < fp16.weight < bf16.weight < 1e-3
        assert TOLERANCE < int8.weight < 1e-2
        assert fp16.apart == bf16.apart == int8.apart == 0
        for rounded, row in ((fp16, 2 * DIM), (bf16, 2 * DIM), (int8, DIM + SCALE_BYTES)):
            of_rows = {tier: sent // (4 * DIM) * row for tier, sent in fp32.sent.items()}
            assert rounded.sent == of_rows
        assert all(fp32.sent.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_parity_on_gpus() -> None:
    cases = [replace(case, device_type="cuda") for case in MATRIX]
    num_ranks = min(2, torch.cuda.device_count())
    for local in range(1, num_ranks + 1):
        by_rank = launch(run_cases, num_ranks, cases, backend=CUDA_BACKEND, local_world_size=local)
        _assert_equal(cases, by_rank, 1e-5)


def _check(cases: list[Case], cluster: str) -> None:
    world_size, local = CLUSTERS[cluster]
    _assert_equal(cases, run_on_ranks(run_cases, world_size, cases, local_world_size=local))


def _assert_equal(
    cases: list[Case], by_rank: list[list[Difference]], tolerance: float = TOLERANCE
) -> None:
    for differences in by_rank:
        for case, difference in zip(cases, differences, strict=True):
            assert difference.loss <= tolerance, case
            assert difference.output <= tolerance, case
            assert difference.weight <= tolerance, case
            assert difference.apart == 0, case
            # Every table and layer learns, or equal weights would say nothing.
            assert difference.moved > 20 * tolerance, case
            assert difference.pipelines_all or not case.pipelined, case
