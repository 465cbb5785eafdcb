"""What ``auto`` chooses: as good as the best by hand, the same each time, and told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from ruamel.yaml import YAML
from tests.commands import recd
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_torchrec.shardings import TableWise
from recd_plugin_tuning.auto import patterns_of
from recd_plugin_tuning.tests.auto_cases import AUTO, NO_COMPUTE, chosen_of, slow
from recd_plugins import prepare
from recd_plugins.drop_in.wrap import wrap
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.model_tables import all_tables_of, embedding_modules
from recd_plugins.interfaces.step_cost import AllReduceCost, AllToAllCost, LookupCost, StageCosts
from recd_plugins.model.build import build_model
from recd_plugins.planning.plan_context import plan_context
from recd_plugins.planning.report import render
from recd_plugins.planning.step_cost import Compute, Operations, estimate_step_cost, predict_stages
from recd_plugins.planning.study import ShardableModel, study, with_plugins
from recd_plugins.planning.topologies import TopologySpec, load_topology
from recd_plugins.runtime.errors import NoPlanError, RegistryError
from recd_plugins.training.identity import identity_of

SEQUENCES, BAGS = ["t_seq_*"], ["t_usr_*", "t_item_*"]
COALESCED = {"coalesce": True}


def seconds_of(candidate: ShardableModel, spec: TopologySpec) -> float:
    planned = candidate.plan(spec.to_torchrec(), 256)
    works = estimate_step_cost(
        candidate.tables,
        planned.sharding,
        candidate.profile,
        NO_COMPUTE,
        batch_size=256,
        world_size=spec.world_size,
        local_world_size=spec.ranks_per_node,
        parts=candidate.prepared.plugin_strategies,
    )
    return predict_stages(works, spec.least_costs).total


def by_hand() -> Iterator[list[dict[str, Any]]]:
    of_sequences = [None, ("torchrec.planner", COALESCED), ("flexshard.joint", {})]
    of_sequences.append(("flexshard.joint", COALESCED))
    for sequences, bags in product(of_sequences, [None, ("torchrec.planner", COALESCED)]):
        chosen: list[Any] = [each for each in ((sequences, SEQUENCES), (bags, BAGS)) if each[0]]
        yield [{"use": e[0], "tables": tables, "options": e[1]} for e, tables in chosen]


@pytest.mark.parametrize("converter", ["recd.kjt", "recd.ikjt"])
def test_nothing_by_hand_is_much_better(make_registry, converter: str) -> None:
    spec, given = slow(), {"converter": {"use": converter}}
    auto = with_plugins(make_registry(sharding=AUTO, **given), spec)
    found = chosen_of(auto.prepared)
    plans = (with_plugins(make_registry(sharding=each, **given), spec) for each in by_hand())
    least = min(seconds_of(plan, spec) for plan in plans)
    assert seconds_of(auto, spec) <= 1.1 * least
    assert found.planner is not None
    assert found.seconds < 0.7 * found.planner
    assert any(each.offer for each in found.groups)


def test_it_leaves_no_trace_and_comes_to_the_same(make_registry) -> None:
    registry = make_registry(sharding=AUTO)
    model = build_model(registry, registry.dataset.schema())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    context = plan_context(registry, list(embedding_modules(model)), slow())
    # The poolings that go into the model draw what they begin with.
    twice = [prepare(registry, build_model(registry, registry.dataset.schema()), context)]
    torch.set_rng_state(state)
    twice.append(prepare(registry, model, context))
    first, second = (json.dumps(chosen_of(each).as_json()) for each in twice)
    assert first == second
    after = [each.model.state_dict() for each in twice]
    assert after[0].keys() == after[1].keys()
    for name, value in before.items():
        torch.testing.assert_close(after[1][name], value, rtol=0, atol=0)
    drawn = [name for name in after[0] if name not in before]
    assert drawn, "poolings"
    for registry_of in twice:
        assert not any(entry.plugin.name == "auto" for entry in registry_of.registry.sharding)


def test_its_lines_say_the_same(make_registry) -> None:
    spec, given = slow(), {"converter": {"use": "recd.kjt"}}
    auto = with_plugins(make_registry(sharding=AUTO, **given), spec).prepared
    lines = YAML(typ="safe").load(chosen_of(auto).lines())
    pasted = with_plugins(make_registry(**lines, **given), spec).prepared
    names = [table.name for table in auto.tables]

    def entries(registry: Any) -> list[Any]:
        return [
            (entry.plugin.name, entry.plugin.options, [n for n in names if entry.matches(n)])
            for entry in registry.sharding
        ]

    assert entries(pasted.registry) == entries(auto.registry)
    assert pasted.coalesced == auto.coalesced != frozenset()
    uses = [entry["use"] for entry in identity_of(auto.registry, auto.tables)["sharding"]]
    assert uses == [entry["use"] for entry in lines["sharding"]]


def test_a_plan_tells_why(make_registry) -> None:
    compute = Compute(Operations(matmul_flops=1e6), Operations(matmul_flops=1e6), 10_000)
    large = {"embedding_dim": 16, "num_embeddings": 100_000}
    registry = make_registry(sharding=AUTO, model=large)
    made = study(registry, "slow", slow(), 256, lambda _: None, compute)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(made))
    shown, told = capture.get(), made.as_json()["auto"]
    assert "auto: choice for each group" in shown
    assert told["registry"] in shown
    assert told["milliseconds"] < told["milliseconds_of_the_planner"]
    names = [name for group in told["groups"] for name in group["tables"]]
    assert sorted(names) == sorted(table.name for table in made.plugins.tables)
    for group in told["groups"]:
        assert all(other["milliseconds"] > 0 for other in group["others"])


def test_recd_plan_puts_it_in_place_of_the_first_entry(make_registry) -> None:
    training = {"batch_size": 64, "ranks": 4, "ranks_per_node": 2, "device": "cpu"}
    entries = [{"use": "torchrec.row_wise", "tables": ["t_*"]}]
    path = make_registry(sharding=entries, training=training).path
    said = recd("plan", path, "--auto")
    assert "2 nodes of machine: 4 ranks on cpu" in said
    assert "auto: choice for each group" in said
    assert "flexshard.joint {budget" in said, "what others were predicted at"


def test_others_keep_their_tables(make_registry) -> None:
    entry = {"use": "torchrec.row_wise", "tables": ["t_seq_0_0", "t_usr_0"]}
    found = with_plugins(make_registry(sharding=[*AUTO, entry]), slow()).prepared
    names = [name for each in chosen_of(found).groups for name in each.tables]
    assert not {"t_seq_0_0", "t_usr_0"} & set(names)
    claims = found.registry.claim("sharding", [table.name for table in found.tables])
    assert claims["t_usr_0"].plugin.name == "torchrec.row_wise"
    assert "t_usr_0" not in chosen_of(found).lines()
    assert chosen_of(found).lines().startswith("# sharding: replace the auto entry by\n  - {use: ")


def test_sequences_may_be_whole_where_calls_of_kernels_take_time(make_registry) -> None:
    registry = make_registry(sharding=AUTO)
    model = build_model(registry, registry.dataset.schema())
    sequences, bags = ([t for t in all_tables_of(model) if t.pooled == p] for p in (False, True))

    def offers(tables: list[Table], seconds: float) -> list[Any]:
        costs = StageCosts(lookup=LookupCost(lookups=seconds))
        modules = list(embedding_modules(model))
        return list(TableWise.offers(tables, plan_context(registry, modules, slow(costs=costs))))

    assert offers(sequences, 1e-3) == [{}], "that coalescing saves is known of an auto that asks"
    assert offers(sequences, 0.0) == offers(bags, 1e-3) == []


@pytest.mark.parametrize("milliseconds", [1e-6, 5.0])
def test_tables_are_on_every_rank_where_that_spares_collectives(
    make_registry, milliseconds: float
) -> None:
    spec = load_topology("machine", nodes=1, ranks=2)
    costs = StageCosts(
        all_to_all=AllToAllCost(collectives=milliseconds / 1e3, bytes_in_node=1e-9),
        all_reduce=AllReduceCost(bytes_reduced=1e-9),
    )
    auto = with_plugins(make_registry(sharding=AUTO), spec.model_copy(update={"costs": costs}))
    pooled = [each for each in chosen_of(auto.prepared).groups if each.pooled]
    replicated = [str(each.offer) == "torchrec.planner {replicate: true}" for each in pooled]
    assert all(replicated) == (milliseconds == 5.0)
    if all(replicated):
        plan = auto.plan(spec.to_torchrec(), 256).sharding.plan
        kinds = {n: each.sharding_type for tables in plan.values() for n, each in tables.items()}
        names = {name for each in pooled for name in each.tables}
        assert {kinds[name] for name in names} == {"data_parallel"}


@pytest.mark.parametrize(
    ("other", "cluster", "message"),
    [
        (("auto", "t_usr_0"), {}, r"sharding\[1\]: auto is already used in sharding\[0\]"),
        (("torchrec.row_wise", "*"), {}, r"sharding\[0\]: the other entries select every table"),
        (None, {"ddr_bytes": 100_000}, r"sharding\[0\]: 'auto' found no plan that fits"),
    ],
)
def test_what_cannot_be_is_refused(make_registry, other: Any, cluster: Any, message: str) -> None:
    others = [{"use": other[0], "tables": [other[1]]}] if other else []
    with pytest.raises((RegistryError, NoPlanError), match=message):
        with_plugins(make_registry(sharding=[*AUTO, *others]), slow(**cluster))


def test_a_trainer_without_data_is_told_what_that_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text("version: 1\nsharding: [{use: auto}]\ntraining: {ranks: 2}\n")
    table = EmbeddingConfig(name="t_a", feature_names=["a"], num_embeddings=99, embedding_dim=8)
    ready = wrap(EmbeddingCollection(tables=[table], device=torch.device("cpu")), path)
    (group,) = chosen_of(ready).groups
    assert group.offer is None
    assert {str(offer) for offer, why in group.refused if "needs training data" in why} == {
        "flexshard.joint", "flexshard.joint {coalesce: true}"
    }  # fmt: skip
    assert ready.registry.sharding == ()
    assert chosen_of(ready).lines() == "sharding: []"


@pytest.mark.parametrize(
    ("names", "others", "patterns"),
    [
        (["t_seq_0", "t_seq_1"], ["t_usr_0"], ["t_seq_*"]),
        (["t_seq_0", "t_seq_1"], ["t_seq_2", "t_usr_0"], ["t_seq_0", "t_seq_1"]),
        (["t_a_1", "t_b_1", "t_b_2"], ["t_c"], ["t_a_1", "t_b_*"]),
        (["t_[x]_1", "t_[x]_2"], ["t_x_1"], ["t_[[]x]_*"]),
        (["t_a", "t_b"], [], ["t_*"]),
    ],
)
def test_patterns_are_short(names: list[str], others: list[str], patterns: list[str]) -> None:
    assert patterns_of(names, others) == patterns
