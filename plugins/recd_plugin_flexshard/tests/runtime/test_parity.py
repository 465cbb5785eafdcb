"""Training with tiers is training without: loss, outputs and weights agree after six steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.covering import cells_of_today, of_today
from tests.distributed.parity_cases import Optimizer
from tests.distributed.parity_model import DIM

from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugin_flexshard.tests.runtime.tier_cases import Case, Difference, Fault, run_cases
from recd_plugin_flexshard.tests.runtime.tier_model import (
    FEATURES,
    Form,
    Tiers,
)
from recd_plugins.runtime.launch import CUDA_BACKEND, launch
from recd_plugins.sharding.wire import SCALE_BYTES
from recd_plugins.testing.gloo import run_on_ranks

TOLERANCE = 1e-6
# Ranks, and ranks of a node.
CLUSTERS = {"2x1": (2, 1), "1x2": (2, 2), "2x2": (4, 2), "3x2": (6, 2)}
UP_TO_TWO = ("2x1", "1x2", "2x2")
TWO_AND_FOUR = ("2x1", "2x2")
TWO_AND_THREE: tuple[Tiers, ...] = ("two", "three")
ODD: tuple[Tiers, ...] = ("flex", "all", "few", "empty")
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad")
FORMS: tuple[Form, ...] = ("kjt", "ikjt")
SYNCS: tuple[tuple[CopyTier, ...], ...] = ((), ("hot", "flex"))
MATRIX = [
    Case(tiers, optimizer, pipelined, form, sparse=sparse)
    for tiers, optimizer, pipelined, form, sparse in product(
        TWO_AND_THREE, OPTIMIZERS, (False, True), FORMS, SYNCS
    )
]
ODD_TIERS = [
    Case(tiers, "rowwise_adagrad", pipelined, "ikjt", sparse=("hot", "flex") if pipelined else ())
    for tiers, pipelined in product(ODD, (False, True))
]
UNTIERED = [
    Case("three", "sgd", True, "kjt", untiered=sharding)
    for sharding in ("table_wise", "column_wise", "data_parallel")
]
# All tables, or those with tiers.
COALESCED = [
    replace(case, coalesced=tuple(FEATURES) if case.pipelined else ("t0", "t1", "t2"))
    for case in (*MATRIX, *ODD_TIERS)
    if case.tiers in ("three", "all", "empty") and case.optimizer == "rowwise_adagrad"
]


@pytest.mark.parametrize("cluster", UP_TO_TWO)
def test_parity(cluster: str) -> None:
    today = cells_of_today(
        list(product(UP_TO_TWO, TWO_AND_THREE, OPTIMIZERS, (False, True), FORMS, SYNCS))
    )
    cases = [
        Case(tiers, opt, pipelined, form, sparse=sparse)
        for of, tiers, opt, pipelined, form, sparse in today
        if of == cluster
    ]
    _check(cases, cluster)


def test_parity_on_more_nodes() -> None:
    """Of two nodes the other one is the next one, and the one before; of three it is not."""
    today = cells_of_today(list(product(TWO_AND_THREE, OPTIMIZERS, (False, True), SYNCS)), 1)
    cases = [
        Case(tiers, opt, pipelined, FORMS[pipelined], sparse=sparse)
        for tiers, opt, pipelined, sparse in today
    ]
    _check(cases, "3x2")


@pytest.mark.parametrize("cluster", TWO_AND_FOUR)
def test_parity_of_odd_tiers(cluster: str) -> None:
    _check(_today(ODD_TIERS, cluster), cluster)


@pytest.mark.parametrize("cluster", ["1x2", "2x2"])
def test_parity_beside_tables_without_tiers(cluster: str) -> None:
    _check(UNTIERED, cluster)


@pytest.mark.parametrize("cluster", TWO_AND_FOUR)
def test_parity_of_coalesced_tables(cluster: str) -> None:
    _check(_today(COALESCED, cluster), cluster)


@pytest.mark.parametrize("cluster", ["2x2", "3x2"])
def test_formats_of_fewer_bits_round_and_save(cluster: str) -> None:
    """Copies of a row stay alike on all ranks, also where a rank sums for others (3x2)."""
    exact = Case("three", "sgd", True, "ikjt", sparse=("hot", "flex"), coalesced=tuple(FEATURES))
    exact = replace(exact, sends_all=True)
    cases = [
        exact,
        replace(exact, wire="fp16"),
        replace(exact, wire="bf16", pipelined=False),
        replace(exact, wire="int8"),
        replace(exact, wire="fp16", sends_all=False),
    ]
    world_size, local_world_size = CLUSTERS[cluster]
    for by_case in run_on_ranks(run_cases, world_size, cases, local_world_size=local_world_size):
        fp32, fp16, bf16, int8, once = by_case
        assert (once.weight, once.apart) == (fp16.weight, 0)
        assert once.sent["cold"] != fp16.sent["cold"]
        assert TOLERANCE < fp16.weight < bf16.weight < 1e-3
        assert TOLERANCE < int8.weight < 1e-2
        assert fp16.apart == bf16.apart == int8.apart == 0
        for rounded, row in ((fp16, 2 * DIM), (bf16, 2 * DIM), (int8, DIM + SCALE_BYTES)):
            assert rounded.sent == {
                tier: num_bytes // (4 * DIM) * row for tier, num_bytes in fp32.sent.items()
            }
        assert all(fp32.sent.values())


@pytest.mark.parametrize("fault", ["sum", "hot", "flex"])
def test_a_wrong_gradient_is_caught(fault: Fault) -> None:
    case = Case("three", "sgd", False, "kjt", fault=fault)
    for (difference,) in run_on_ranks(run_cases, 2, [case], local_world_size=1):
        assert difference.weight > 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_parity_on_gpus() -> None:
    """One rank a GPU; with two or more, as nodes of one rank and as one node."""
    cases = [replace(case, device_type="cuda") for case in MATRIX]
    num_ranks = min(2, torch.cuda.device_count())
    for ranks_per_node in range(1, num_ranks + 1):
        by_rank = launch(
            run_cases, num_ranks, cases, backend=CUDA_BACKEND, local_world_size=ranks_per_node
        )
        for differences in by_rank:
            for case, difference in zip(cases, differences, strict=True):
                _assert_equal(difference, case, tolerance=1e-5)


def _today(cases: list[Case], cluster: str) -> list[Case]:
    """By day a third of the cases on two ranks, and another third on four."""
    return list(of_today(cases, 3, TWO_AND_FOUR.index(cluster)))


def _check(cases: list[Case], cluster: str) -> None:
    world_size, local_world_size = CLUSTERS[cluster]
    by_rank = run_on_ranks(run_cases, world_size, cases, local_world_size=local_world_size)
    for differences in by_rank:
        for case, difference in zip(cases, differences, strict=True):
            _assert_equal(difference, case)


def _assert_equal(difference: Difference, case: Case, tolerance: float = TOLERANCE) -> None:
    assert difference.loss <= tolerance, case
    assert difference.output <= tolerance, case
    assert difference.weight <= tolerance, case
    assert difference.apart == 0 or case.fault, case
    # Every table and layer learns, or equal weights would say nothing.
    assert difference.moved > 20 * tolerance, case
    assert difference.num_pipelined == (difference.num_modules if case.pipelined else 0), case
