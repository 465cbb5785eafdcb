from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.covering import by_night, cells_of_today, covering
from tests.distributed.parity_cases import LEARNING_RATE, Case, Difference, run_cases
from tests.distributed.parity_model import Form
from tests.small_registry import write_registry

from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import Pooling
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed", "among")
RANKS = (1, 2, 4)
ALL = ("b0", "b1", "b2", "s0", "s1", "s2", "s3")
SOME = ("b1", "b2", "s0", "s2")


def differences(world_size: int, cases: list[Case], **options: Any) -> list[list[Difference]]:
    return run_on_ranks(run_cases, world_size, cases, **options)


def assert_equal(world_size: int, cases: list[Case], **options: Any) -> None:
    for of_rank in differences(world_size, cases, **options):
        for case, difference in zip(cases, of_rank, strict=True):
            difference.check(case)


def _is_a_case(cell: tuple[Any, ...]) -> bool:
    sharding, world_size, modules, _, form, coalesced, _ = cell
    if sharding == "among":
        return (modules, form, coalesced) == ("both", "unique", ()) and world_size < 4
    if coalesced:  # ids of data-parallel tables are not sent
        return form != "partial" and sharding not in ("data_parallel", "mixed")
    return form != "partial" or modules != "ebc"


@cache
def cells() -> list[tuple[Any, ...]]:
    axes: list[tuple[Any, ...]] = [
        SHARDINGS,
        RANKS,
        ("ebc", "ec", "both"),
        ("sgd", "rowwise_adagrad"),
        ("unique", "partial", "plain"),
        ((), ALL, SOME),
        (False, True),
    ]
    every = [cell for cell in product(*axes) if _is_a_case(cell)]
    return every if by_night() else covering(every, 2)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", RANKS)
def test_parity(world_size: int, sharding: str) -> None:
    overlapped = sharding == "among"
    todo = [
        Case(
            *(sharding, modules, optimizer, pipelined),
            form=form,
            coalesced=coalesced,
            overlapped=overlapped and pipelined,
            sizes_once=number % 2 == 0,
        )
        for number, (kind, ranks, modules, optimizer, form, coalesced, pipelined) in enumerate(
            cells()
        )
        if (kind, ranks) == (sharding, world_size)
    ]
    assert_equal(world_size, todo)


def test_parity_of_table_row_wise_on_two_nodes() -> None:
    todo = [
        Case("table_row_wise", "ebc", "sgd", pipelined, coalesced=coalesced, sizes_once=True)
        for pipelined, coalesced in product((False, True), ((), ALL))
    ]
    assert_equal(4, todo, local_world_size=2)


#: Optimizer entries of bags and sequences; s3 has none.
ENTRIES: dict[str, tuple[str, dict[str, float]]] = {
    "b0": ("torchrec.adagrad", {"learning_rate": 0.02, "eps": 1e-4}),
    "b1": ("torchrec.sgd", {"learning_rate": 0.3}),
    "b2": ("torchrec.rowwise_adagrad", {"learning_rate": 0.02, "eps": 1e-4}),
    "s0": ("torchrec.adagrad", {"learning_rate": 0.05, "eps": 1e-3}),
    "s1": ("torchrec.sgd", {"learning_rate": 0.1}),
    "s2": ("torchrec.rowwise_adagrad", {"learning_rate": 0.05, "eps": 1e-3}),
}


def test_parity_of_optimizer_entries(tmp_path: Path) -> None:
    path = write_registry(
        tmp_path,
        optimizers=[
            {"use": use, "tables": [table], "options": options}
            for table, (use, options) in ENTRIES.items()
        ],
        training={"optimizer": "sgd", "learning_rate": LEARNING_RATE["sgd"]},
    )
    # On CUDA, kernels of Adagrad take no bags of unique ids.
    unique = ALL if DEVICE.type == "cpu" else SOME[2:]
    forms: list[tuple[Form, tuple[str, ...]]] = [("plain", ()), ("unique", ()), ("unique", unique)]
    todo = [
        Case(sharding, "both", "sgd", False, form=form, coalesced=coalesced, registry=path)
        for sharding in ("table_wise", "row_wise")
        for form, coalesced in forms
    ]
    assert_equal(2, todo)


#: Options of every built-in pooling; p2 is a target that is deduplicated, p3 one that is not.
POOLINGS: list[tuple[str, dict[str, Any]]] = [
    ("recd.sum", {}),
    ("recd.mean", {}),
    ("recd.max", {}),
    ("recd.attention", {"heads": 2}),
    ("recd.transformer", {"layers": 2, "heads": 2, "feed_forward": 12}),
    ("recd.transformer", {"norm": "post"}),
    ("recd.din", {"target": "p3"}),
    ("recd.din", {"target": "p2", "weights": "sigmoid", "heads": 2}),
    ("recd.target_attention", {"target": "p3", "layers": 1, "positions": 3}),
]
FORMS, POOL_ROWS = ("unique", "partial"), ("unique", "all")


def pooling(name: str, options: dict[str, Any]) -> Pooling:
    cls = PluginManager().plugins["pooling"][name].cls
    plugin = cls(cls.Options(**options))
    assert isinstance(plugin, Pooling)
    return plugin


@pytest.mark.parametrize(("form", "pool_rows"), product(FORMS, POOL_ROWS))
def test_parity_of_poolings(form: Any, pool_rows: Any) -> None:
    """Histories are empty, and in the last step whole groups are, on one rank or on both."""
    today = cells_of_today([*product(range(len(POOLINGS)), FORMS, POOL_ROWS)])
    todo = [
        Case(
            *("mixed", "both", "sgd", index % 2 == 1),
            pooling=pooling(*POOLINGS[index]),
            form=form,
            pool_rows=pool_rows,
        )
        for index, *common in today
        if common == [form, pool_rows]
    ]
    assert_equal(2, todo)


def test_every_pooling_is_in_the_list() -> None:
    assert {name for name, _ in POOLINGS} == set(PluginManager().plugins["pooling"])


def test_a_wrong_gather_and_a_wrong_gradient_are_caught() -> None:
    gather = Case("table_wise", "ec", "sgd", False, form="partial", fault="gather")
    gradients = [Case("table_wise", kind, "sgd", False, fault="gradient") for kind in ("ebc", "ec")]
    of_ranks = differences(2, [gather, *gradients])
    assert all(of_rank[0].output > 1e-3 for of_rank in of_ranks)
    for of_case in zip(*of_ranks, strict=True):
        assert max(difference.weight for difference in of_case) > 1e-3
