from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recd_plugin_flexshard.planning import TableTiers
from recd_plugin_flexshard.runtime import TieredEmbeddingCollection
from recd_plugin_flexshard.strategy import TieredStrategy
from recd_plugins import load_registry, prepare
from recd_plugins.model.build import build_model
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import this_machine
from recd_plugins.runtime.errors import RegistryError, SetupError

from .conftest import ELSEWHERE, SEQUENCES, MakeRegistry

THREE = {"plan_for": ELSEWHERE, "dedupe": "none", "profile_rows": 1024}


def prepared(path: Path) -> tuple[nn.Module, Prepared]:
    registry = load_registry(path)
    torch.manual_seed(0)
    before = build_model(registry, registry.dataset.schema())
    torch.manual_seed(0)
    return before, prepare(registry, build_model(registry, registry.dataset.schema()))


def tiered(model: nn.Module) -> dict[str, TieredEmbeddingCollection]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, TieredEmbeddingCollection)
    }


def tiers_of(prepared: Prepared) -> dict[str, TableTiers]:
    return {
        table.name: table
        for part in prepared.parts.values()
        if isinstance(part, TieredStrategy)
        for table in part.plan.tables
    }


def test_one_collection_with_tiers_takes_the_place_of_the_other(
    make_registry: MakeRegistry,
) -> None:
    entry = {"use": "flexshard.three_tier", "tables": SEQUENCES[:2], "options": THREE}
    before, found = prepared(make_registry("flexshard.two_tier", sharding=[entry]))
    model = found.model
    (path, module), *more = tiered(model).items()
    assert path == "sequences"
    assert not more
    assert list(module.tiers) == SEQUENCES[:2]
    for rows in ("hot", "flex"):
        assert sum(len(getattr(t, rows)) for t in module.tiers.values()) > 0
    assert [config.name for config in module.embedding_configs()] == SEQUENCES
    assert model.state_dict().keys() == before.state_dict().keys()
    for name, value in before.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    assert tiers_of(found).keys() == set(SEQUENCES[:2])
    for name, tiers in module.tiers.items():
        planned = tiers_of(found)[name]
        assert (len(tiers.hot), len(tiers.flex)) == (planned.hot, planned.flex)


def test_several_entries_take_tables_of_one_collection(make_registry: MakeRegistry) -> None:
    entries = [
        {"use": "flexshard.three_tier", "tables": SEQUENCES[:1], "options": THREE},
        {"use": "flexshard.joint", "tables": SEQUENCES[1:2]},
        {"use": "torchrec.table_wise", "tables": SEQUENCES[2:]},
    ]
    _, found = prepared(make_registry("", sharding=entries))
    (module,) = tiered(found.model).values()
    assert list(module.tiers) == SEQUENCES[:2]
    assert list(found.parts) == ["sharding[0]", "sharding[1]"]
    plan = found.planner().plan(found.model, found.sharders())
    kinds = {name: sharding.sharding_type for name, sharding in plan.plan["sequences"].items()}
    assert list(kinds.values()) == ["row_wise", "row_wise", "table_wise"]


def test_the_planner_reckons_with_cold_traffic_and_copies(make_registry: MakeRegistry) -> None:
    topology = this_machine(2, nodes=2)
    with_tiers = with_plugins(load_registry(make_registry("flexshard.three_tier", THREE)))
    without = with_plugins(load_registry(make_registry("torchrec.row_wise")))
    mine, theirs = (c.plan(topology.to_torchrec(), 32) for c in (with_tiers, without))
    shares = [tiers_of(with_tiers.prepared)[name].cold_share for name in SEQUENCES]
    for name, share in zip(SEQUENCES, shares, strict=True):
        (a,) = (o for o in mine.options if o.name == name)
        (b,) = (o for o in theirs.options if o.name == name)
        assert a.sharding_type == b.sharding_type == "row_wise"
        for part in ("fwd_comms", "bwd_comms", "input_dist_comms"):
            got, all_ids = (getattr(o.shards[0].perf, part) for o in (a, b))
            assert got == pytest.approx(share * all_ids, rel=1e-6, abs=1e-12)


Options = Callable[[Path], dict[str, Any]]


@pytest.mark.parametrize(
    ("use", "options", "says"),
    [
        ("joint", lambda p: {"profile": str(p)}, "no such file. Create it"),
        ("joint", lambda p: {"budget": "0.01x"}, "'budget' ('0.01x') is too small"),
        ("three_tier", lambda p: {}, "Use 'flexshard.two_tier' or 'flexshard.joint'"),
    ],
)
def test_what_is_refused_names_the_line(
    make_registry: MakeRegistry, tmp_path: Path, use: str, options: Options, says: str
) -> None:
    given = options(tmp_path / "p.parquet")
    path = make_registry(f"flexshard.{use}", given, training={"ranks_per_node": None})
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "sharding:" in text)
    with pytest.raises(RegistryError) as raised:
        prepared(path)
    (problem,) = raised.value.problems
    assert (problem.line, problem.field) == (line, "sharding[0]")
    assert says in problem.message


def test_pooled_tables_and_unknown_options_are_refused(make_registry: MakeRegistry) -> None:
    pooled = {"use": "flexshard.two_tier", "tables": ["t_*"]}
    with pytest.raises(RegistryError, match=r"registry\.yaml:\d+ sharding\[0\]: .*item_0"):
        prepared(make_registry("", sharding=[pooled]))
    with pytest.raises(RegistryError, match=r"options\.minimize: .*Did you mean 'minimise'\?"):
        load_registry(make_registry("flexshard.joint", {"minimize": "bytes"}))
    with pytest.raises(RegistryError, match=r"options\.budget: 'lots' is not a valid budget"):
        load_registry(make_registry("flexshard.joint", {"budget": "lots"}))


def test_other_plugins_may_not_shard_tiers_otherwise(make_registry: MakeRegistry) -> None:
    cache = [{"use": "torchrec.uvm", "tables": ["t_seq_0_0"]}]
    _, found = prepared(make_registry("flexshard.joint", cache=cache))
    with pytest.raises(SetupError, match=r"'flexshard\.joint' set different compute_kernels"):
        found.planner()


def test_entries_of_one_collection_are_retiered_together(make_registry: MakeRegistry) -> None:
    entries = [
        {"use": "flexshard.two_tier", "tables": SEQUENCES[:1], "options": {"retier_every": 5}},
        {"use": "flexshard.joint", "tables": SEQUENCES[1:]},
    ]
    with pytest.raises(RegistryError, match="retier_every: 5 and retier_every: null"):
        prepared(make_registry("", sharding=entries))
