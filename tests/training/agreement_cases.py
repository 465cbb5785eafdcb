"""Rank 1 differs in one thing, and every rank says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.training.deferred_cases import Model, sharded
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins import load_registry
from recd_plugins.planning import choosing
from recd_plugins.runtime.errors import NoPlanError, SetupError
from recd_plugins.runtime.rank_agreement import check_agreement, check_started_alike
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.training.assembly import assemble

CPU = torch.device("cpu")
Case = Callable[[bool], Any]


def features(names: list[str]) -> KeyedJaggedTensor:
    ids, lengths = torch.arange(8) % 4, torch.ones(8, dtype=torch.int64)
    return KeyedJaggedTensor(names, ids, lengths=lengths)


def plan(differs: bool) -> None:
    """Ranks that plan without one another."""
    with patch.object(
        recd_plugins.planning.planner.RegistryPlanner,
        "collective_plan",
        lambda self, module, sharders, _: self.plan(module, sharders),
    ):
        sharded(Model(), "table_wise" if differs else "row_wise")


def loader(differs: bool) -> None:
    """One rank's batches go through ``dedup``, and not the other's."""
    dmp, batch = sharded(Model(), "row_wise"), {"bags": features(["b0", "b1"])}
    if differs:
        batch = recd_plugins.wrap(Model()).dedup.batch(batch)
    dmp(batch["bags"], features(["e0", "e1"]))


def run(differs: bool, path: Any) -> None:
    """`recd run`, which is told another seed, or data of which fewer rows repeat."""
    registry = load_registry(path)
    assemble(registry.with_training({"seed": 1}) if differs else registry, "plugins", CPU)


def started_on_another_device(differs: bool, _: Any) -> None:
    """`recd run`, `predict` and `evaluate` where one host has no GPU."""
    check_started_alike("cpu" if differs else "cuda", {})


def run_where_a_file_is_missing(differs: bool, path: Any) -> None:
    """`recd run` of hosts that have copies of a table, of which one is old."""
    table = path.with_name("fewer" if differs else "all")
    settings = [f"dataset.options.path={table}"]
    assemble(load_registry(path.with_name("files.yaml"), settings=settings), "plugins", CPU)


def entry_by_rank(path: Any, name: str) -> None:
    """`recd run` of an entry whose plugin decides by its rank."""
    registry = load_registry(path.with_name(f"{name}.yaml"), plugins_dir=path.parent / "plugins")
    assemble(registry, "plugins", CPU)


def constraints_by_rank(_: bool, path: Any) -> None:
    entry_by_rank(path, "constrains")


def rewritten_by_rank(_: bool, path: Any) -> None:
    entry_by_rank(path, "rewrites")


def auto_finds_nothing(differs: bool, path: Any) -> None:
    """Rank 0 chooses, and fails."""

    def find(*_: Any) -> None:
        assert not differs, "rank 0 alone chooses"
        raise NoPlanError("nothing fits here")

    with patch.object(choosing, "_find", find):
        assemble(load_registry(path), "plugins", CPU)


def chosen(rank: int, world_size: int, path: Any) -> list[Any]:
    """The entries that rank 0 chose, of its search on one rank."""
    found = assemble(load_registry(path), "plugins", CPU)
    entries = found.prepared.registry.sharding
    return [str(found.prepared.chosen), [(e.plugin.name, e.patterns) for e in entries]]


def said(rank: int, world_size: int, cases: list[Case], *paths: Any) -> list[str]:
    """What each case is refused with."""
    return [_said(case, rank, *paths) for case in cases]


def _said(case: Case, rank: int, *paths: Any) -> str:
    try:
        case(rank == 1, *paths)
    except SetupError as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing"


def counted(rank: int, world_size: int) -> tuple[int, str]:
    """Bytes that agreement counts as, and what objects without plain values are told as."""
    with CollectiveBytes() as counter:
        check_agreement("a test", {"objects": [nn.Linear(1, 1), object(), counted, {3, 1}]})
        sharders = get_default_sharders()
        check_agreement("a test", {"sharders": sharders, "a lambda": lambda: rank})
    try:
        check_agreement("a test", {"long": {"value": "x" * 100 + str(rank)}, "same": 1})
    except SetupError as error:
        return counter.total, str(error)
    raise AssertionError
