"""Optimizer entries of tables, and learning rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.plugin_files import write_plugins
from tests.sharded import bags
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recd_plugins import RunConfig, load_registry
from recd_plugins.config.schema import ScheduleSpec
from recd_plugins.interfaces import TableStrategy
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.planning.prepared import apply_optimizers
from recd_plugins.runtime.errors import RegistryError
from recd_plugins.training.optimizer import LearningRates, factor

HEAD = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9, item: 9}}}
converter: {use: recd.kjt}
"""


PLUGIN = """
import torch

class Own(torch.optim.SGD):
    pass

RETURNED = {
    "unknown_class": RowUpdate(Own, {"lr": 0.1}),
    "momentum": RowUpdate(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": RowUpdate(torch.optim.Adagrad, {"lr": 0.1}),
}

class Mine(Optimizer):
    "Rates by width."
    name = "acme.mine"

    def update(self, table):
        if table.name == "t_refused":
            raise DataError("'acme.mine' needs embedding_dim 4, got 8. Remove 't_refused'")
        if table.name == "t_raised":
            return 1 / 0
        return RETURNED.get(table.name[2:], RowUpdate(torch.optim.SGD, {"lr": table.embedding_dim}))
"""


def registry_of(folder: Path, text: str) -> RunConfig:
    (folder / "registry.yaml").write_text(HEAD + text)
    plugins_dir = write_plugins(folder, PLUGIN, "Mine")
    return load_registry(folder / "registry.yaml", plugins_dir=plugins_dir)


def model_of(*features: str, device: str = "meta") -> EmbeddingBagCollection:
    return bags(*features, rows=20, dim=8, device=torch.device(device))


def applied(
    registry: RunConfig,
    model: EmbeddingBagCollection,
    parts: Mapping[str, TableStrategy] | None = None,
) -> EmbeddingBagCollection:
    modules, tables = list(embedding_modules(model)), tables_of(model)
    apply_optimizers(registry, modules, tables, "cpu", parts or {})
    return model


MINE = "optimizers:\n  - {use: acme.mine, tables: [t_a]}\n"


def test_a_plugin_of_ones_own_sees_its_tables(tmp_path: Path) -> None:
    model = applied(registry_of(tmp_path, MINE), model_of("a", "b"))
    weights = dict(model.named_parameters())
    assert weights["embedding_bags.t_a.weight"]._optimizer_kwargs == [{"lr": 8}]
    assert not hasattr(weights["embedding_bags.t_b.weight"], "_optimizer_kwargs")


def test_tables_that_have_no_memory_yet_need_none(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", "t_adagrad"))
    with deferred_tables() as deferred:
        applied(registry, model_of("adagrad", device="cpu"))
    assert not deferred.touched


@pytest.mark.parametrize(
    ("table", "kind", "said"),
    [
        ("unknown_class", ValueError, r"acme.mine' failed in update of table 't_unknown_class'"),
        ("momentum", RegistryError, r"yaml:5 optimizers\[0\]: table 't_momentum': .* ignore .*mom"),
        ("refused", RegistryError, r"yaml:5 optimizers\[0\]: 'acme.mine' needs embedding_dim 4"),
        ("raised", ZeroDivisionError, r"failed in update of table 't_raised' \(.*acme.py:\d+"),
    ],
)
def test_bad_updates(tmp_path: Path, table: str, kind: type[Exception], said: str) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", f"t_{table}"))
    with pytest.raises(kind, match=said):
        applied(registry, model_of(table))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sharding: [{use: torchrec.data_parallel, tables: [t_a]}]", "replicates the table"),
        ("sharding: [{use: torchrec.row_wise, tables: [t_a]}]", "the rows with training.optim"),
        ("cache: [{use: torchrec.uvm, tables: [t_a]}]", r"torchrec.uvm' \(cache\[0\], line 6\)"),
    ],
)
def test_entries_that_train_rows_otherwise(tmp_path: Path, more: str, said: str) -> None:
    class Follows(TableStrategy):
        follows_optimizers = True

    registry = registry_of(tmp_path, f"{MINE}{more}\n")
    field = f"{more.partition(':')[0]}[0]"
    parts = {} if "parallel" in more else {field: TableStrategy()}
    with pytest.raises(RegistryError, match=rf"yaml:5 optimizers\[0\]: table 't_a'.*{said}"):
        applied(registry, model_of("a"), parts)
    if parts:
        applied(registry, model_of("a"), {field: Follows()})


def test_tables_that_cannot_be_trained_so(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE)
    with pytest.raises(RegistryError, match="'t_a' matches no table"):
        applied(registry, model_of("b"))
    twice = applied(registry, model_of("a"))
    with pytest.raises(RegistryError, match="'t_a' already has the optimizer SGD"):
        applied(registry, twice)
    others, tables = list(embedding_modules(model_of("b"))), tables_of(model_of("a"))
    with pytest.raises(RegistryError, match="'t_a' is no longer in an EmbeddingBagCollection"):
        apply_optimizers(registry, others, tables, "cpu", {})


def factors(num_steps: int, /, **schedule: object) -> list[float]:
    spec = ScheduleSpec.model_validate(schedule)
    return [factor(spec, step) for step in range(num_steps)]


def test_factors() -> None:
    assert factors(4) == [1, 1, 1, 1]
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(7, warmup=2, decay="linear", steps=6) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    cosine = factors(5, decay="cosine", steps=3, floor=0.2)
    assert cosine == pytest.approx([1, 0.8, 0.4, 0.2, 0.2])


def test_groups_keep_their_ratio_and_a_loaded_rate_does_not_count() -> None:
    tables, dense = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper({"tables": tables}, lambda p: torch.optim.SGD(p, lr=0.8)),
            KeyedOptimizerWrapper({"dense": dense}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ]
    )
    rates = LearningRates(optimizer, ScheduleSpec(warmup=2))
    optimizer.param_groups[0]["lr"] = 7.0  # as of a checkpoint
    for step, expected in enumerate([[0.4, 0.05], [0.8, 0.1], [0.8, 0.1]]):
        rates.set(step)
        assert [group["lr"] for group in optimizer.param_groups] == expected
    LearningRates(optimizer, None).set(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.1]
