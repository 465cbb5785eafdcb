"""What a registry with flexshard prepares, plans and refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_flexshard.part import TieredPart
from recd_plugin_flexshard.planning import TableTiers
from recd_plugin_flexshard.runtime import TieredEmbeddingCollection
from recd_plugin_flexshard.table_plan import cluster_of
from recd_plugins import load_registry, prepare
from recd_plugins.access.profile import AccessProfile
from recd_plugins.errors import NoPlanError, RegistryError, SetupError
from recd_plugins.model.build import build_model
from recd_plugins.planning.compute import Compute, Operations
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.setting import setting_of
from recd_plugins.planning.study import ShardableModel, study, with_plugins
from recd_plugins.planning.topologies import load_topology, this_machine

from .conftest import ELSEWHERE, ROWS, SEQUENCES, MakeRegistry

THREE = {"plan_for": ELSEWHERE, "dedupe": "none", "profile_rows": 1024}


def prepared(path: Path) -> tuple[nn.Module, Prepared]:
    """The model before, and after."""
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
        for part in prepared.table_parts
        if isinstance(part, TieredPart)
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
        assert (len(tiers.hot), len(tiers.flex)) == (
            tiers_of(found)[name].hot, tiers_of(found)[name].flex
        )  # fmt: skip


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


def test_a_model_of_ones_own_may_be_the_collection_itself(make_registry: MakeRegistry) -> None:
    registry = load_registry(make_registry("flexshard.two_tier", pooling=[]))
    (other,) = tiered(prepared(make_registry("flexshard.two_tier"))[1].model).values()
    found = prepare(
        registry, EmbeddingCollection(tables=other.embedding_configs(), device=torch.device("meta"))
    )
    assert isinstance(found.model, TieredEmbeddingCollection)


def test_the_setting_is_that_of_the_topology(make_registry: MakeRegistry) -> None:
    registry = load_registry(make_registry("flexshard.joint"))
    model = build_model(registry, registry.dataset.schema())
    here = setting_of(registry, model)
    assert (here.world_size, here.ranks_per_node, here.nodes) == (4, 2, 2)
    spec = load_topology("zionex-a100-40g", nodes=4, ranks_per_node=8)
    there = setting_of(registry, model, spec)
    assert (there.world_size, there.ranks_per_node, there.device_type) == (32, 8, "cuda")
    assert there.rates == spec.collective_rates
    assert cluster_of(there).batch_size == 32
    sizes = []
    for topology in (None, spec):
        candidate = with_plugins(load_registry(make_registry("flexshard.joint")), topology)
        parts = candidate.prepared.parts
        assert parts["sharding[0]"].plan.cluster.nodes == (4 if topology else 2)
        sizes.append({name: (t.hot, t.flex) for name, t in tiers_of(candidate.prepared).items()})
    assert sizes[0] != sizes[1]


def candidate(path: Path) -> ShardableModel:
    return with_plugins(load_registry(path))


def test_the_planner_reckons_with_cold_traffic_and_copies(make_registry: MakeRegistry) -> None:
    topology = this_machine(2, nodes=2)
    with_tiers = candidate(make_registry("flexshard.three_tier", THREE))
    without = candidate(make_registry("torchrec.row_wise"))
    mine, theirs = (c.plan(topology.to_torchrec(), 32) for c in (with_tiers, without))
    shares = [tiers_of(with_tiers.prepared)[name].cold_share for name in SEQUENCES]
    for name, share in zip(SEQUENCES, shares, strict=True):
        (a,) = (o for o in mine.options if o.name == name)
        (b,) = (o for o in theirs.options if o.name == name)
        assert a.sharding_type == b.sharding_type == "row_wise"
        for part in ("fwd_comms", "bwd_comms", "input_dist_comms"):
            got, all_ids = (getattr(o.shards[0].perf, part) for o in (a, b))
            assert got == pytest.approx(share * all_ids, rel=1e-6, abs=1e-12)


def test_copies_that_do_not_fit(make_registry: MakeRegistry) -> None:
    options = {**THREE, "budget": "100x"}
    with_tiers = candidate(make_registry("flexshard.two_tier", options))
    (module,) = tiered(with_tiers.prepared.model).values()
    copies = module.overlay_bytes(2, "rowwise_adagrad")
    tables = 5 * ROWS * (8 + 1) * 4
    spec = this_machine(2, nodes=2).model_copy(update={"ddr_bytes": tables // 2 + copies // 2})
    with pytest.raises(NoPlanError, match=r"and copies of rows 0\.\d MiB a rank, on 4 ranks"):
        with_tiers.plan(spec.to_torchrec(), 1)
    without = candidate(make_registry("torchrec.row_wise"))
    assert without.fits(spec.to_torchrec(), 1)


def profile_of_another(path: Path, tables: Mapping[str, int]) -> str:
    from recd_plugins.access.distributions import zipf

    AccessProfile(
        {
            name: zipf(name, rows, length=10.0, exponent=1.0, features=(name[2:],))
            for name, rows in tables.items()
        },
        "another table",
    ).save(path)
    return str(path)


Options = Callable[[Path], dict[str, Any]]


@pytest.mark.parametrize(
    ("use", "options", "says"),
    [
        (
            "two_tier",
            lambda p: {"profile": profile_of_another(p, {"t_seq_0_0": ROWS})},
            "does not cover table t_seq_0_1",
        ),
        (
            "joint",
            lambda p: {"profile": profile_of_another(p, dict.fromkeys(SEQUENCES, 77))},
            f"77 rows, and the model's has {ROWS:,}",
        ),
        ("joint", lambda p: {"profile": str(p)}, "no such file; make it"),
        ("joint", lambda p: {"budget": "0.01x"}, "budget 0.01x cannot be kept"),
        ("three_tier", lambda p: {}, "use flexshard.two_tier, or flexshard.joint"),
    ],
)
def test_what_is_refused_names_the_line(
    make_registry: MakeRegistry, tmp_path: Path, use: str, options: Options, says: str
) -> None:
    path = make_registry(
        f"flexshard.{use}", options(tmp_path / "p.parquet"), training={"ranks_per_node": None}
    )
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "use: flex" in text)
    with pytest.raises(RegistryError) as raised:
        prepared(path)
    (problem,) = raised.value.problems
    assert (problem.line, problem.field) == (line, "sharding[0]")
    assert says in problem.message


def test_pooled_tables_and_unknown_options_are_refused(make_registry: MakeRegistry) -> None:
    pooled = {"use": "flexshard.two_tier", "tables": ["t_*"]}
    with pytest.raises(RegistryError, match=r"registry\.yaml:\d+ sharding\[0\]: .*item_0"):
        prepared(make_registry("", sharding=[pooled]))
    with pytest.raises(RegistryError, match=r"options\.minimize: .*did you mean minimise\?"):
        load_registry(make_registry("flexshard.joint", {"minimize": "bytes"}))
    with pytest.raises(RegistryError, match=r"options\.budget: 'lots' is no budget"):
        load_registry(make_registry("flexshard.joint", {"budget": "lots"}))


def test_other_plugins_may_not_shard_tiers_otherwise(make_registry: MakeRegistry) -> None:
    cache = [{"use": "torchrec.uvm", "tables": ["t_seq_0_0"]}]
    _, found = prepared(make_registry("flexshard.joint", cache=cache))
    with pytest.raises(SetupError, match=r"flexshard\.joint set different compute_kernels"):
        found.planner()


def test_entries_of_one_collection_are_retiered_together(make_registry: MakeRegistry) -> None:
    entries = [
        {"use": "flexshard.two_tier", "tables": SEQUENCES[:1], "options": {"retier_every": 5}},
        {"use": "flexshard.joint", "tables": SEQUENCES[1:]},
    ]
    with pytest.raises(RegistryError, match="retier_every 5 and null; give them one"):
        prepared(make_registry("", sharding=entries))


def test_a_feature_that_tiers_do_not_have_alone_names_the_line(make_registry: MakeRegistry) -> None:
    registry = load_registry(make_registry("flexshard.two_tier", pooling=[]))
    tables = [
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=["seq_0_0"])
        for name in ("t_seq_a", "t_other")
    ]
    said = r"sharding\[0\]: feature seq_0_0 looks up tables t_seq_a and t_other, one of which has"
    with pytest.raises(RegistryError, match=said):
        prepare(registry, EmbeddingCollection(tables=tables, device=torch.device("meta")))


def test_the_largest_batch_keeps_the_budget(make_registry: MakeRegistry) -> None:
    many = {"batch_size": 256}
    registry = load_registry(make_registry("flexshard.joint", {"budget": "300KB"}, training=many))
    spec = this_machine(2, nodes=2)
    nothing = Compute(Operations(), Operations(), 0)
    largest = study(registry, "machine", spec, None, lambda _: None, nothing).plugins
    assert largest.largest_batch_size == largest.batch_size < 256
    more = {"batch_size": largest.batch_size + (largest.batch_step or 0)}
    with pytest.raises(RegistryError, match="budget 300KB cannot be kept"):
        with_plugins(registry.with_training(more), spec)
    none = load_registry(make_registry("flexshard.joint", {"budget": "0.01x"}))
    with pytest.raises(RegistryError, match=r"sharding\[0\]: the budget 0\.01x cannot be kept"):
        study(none, "machine", spec, None, lambda _: None, nothing)
