from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.sharded import bags
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recd_plugins import RunConfig, prepare
from recd_plugins.interfaces.step_cost import AllToAllCost, StageCosts
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.report import PlanReport, render
from recd_plugins.planning.step_cost import Compute, Operations
from recd_plugins.planning.study import COMPONENTS, ShardableModel, report_side, study, with_plugins
from recd_plugins.planning.topologies import MACHINE, TopologySpec, load_topology
from recd_plugins.runtime.errors import NoPlanError, SetupError
from recd_plugins.runtime.text import size_text

COMPUTE = Compute(
    Operations(2e6, 1e6),
    Operations(2e6, 1e6),
    10_000,
    pooling_saved_bytes=4000.0,
    rest_saved_bytes=1000.0,
)


def report(registry: RunConfig, spec: TopologySpec, batch_size: int | None = 256) -> PlanReport:
    return study(registry, "some", spec, batch_size, lambda _: None, COMPUTE)


def text(made: PlanReport) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(made))
    return capture.get()


def with_negatives(table: Path, **options: Any) -> dict[str, Any]:
    wrap = [{"use": "ranking.negatives", "options": options}]
    of_table = {"path": str(table), "sparse": ["item_0"]}
    return {"use": "recd.session_parquet", "options": of_table, "wrap": wrap}


def test_wrappers_are_prepared_as_in_a_run(make_registry, table) -> None:
    dataset = with_negatives(table, item="nobody", negatives=1)
    registry = make_registry(dataset=dataset, pooling=[])
    spec = load_topology("machine", ranks=2)
    with pytest.raises(SetupError, match=r"ranking\.negatives.* has no feature 'nobody'"):
        study(registry, "some", spec, 256, lambda _: None)


def test_ids_of_all_modules_are_sent_at_once_with_overlap(make_registry) -> None:
    costs = StageCosts(all_to_all=AllToAllCost(collectives=1.0))
    spec = load_topology("machine", nodes=2, ranks=1).model_copy(update={"costs": costs})

    def collectives(**training: Any) -> float:
        training = {"batch_size": 256, "ranks": 2, **training}
        return report(make_registry(training=training), spec).plugins.seconds.all_to_all

    assert collectives() < collectives(overlap=False)


@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-h100", 1), (MACHINE, 2), ("zionex-a100-40g", 16)]
)
def test_every_topology_is_planned_for(make_registry, name: str, nodes: int) -> None:
    spec = load_topology(name, nodes=nodes, ranks=2)
    made = report(make_registry(), spec)
    assert made.plain is not None
    for variant in (made.plugins, made.plain):
        assert {table.name for table in variant.tables} == {
            "t_item_0", "t_usr_0", "t_usr_1", "t_seq_0_0", "t_seq_0_1", "t_seq_0_2"
        }  # fmt: skip
        assert tuple(variant.memory)[2:] == COMPONENTS
        assert variant.memory_by_rank.shape == (spec.world_size,)
        assert variant.memory_by_rank.max() <= spec.memory_bytes
        assert all((part >= 0).all() for part in variant.memory.values())
        weights = 0
        for table in variant.tables:
            copies = len(table.ranks) if table.sharding_type == "data_parallel" else 1
            weights += 4 * table.num_embeddings * table.embedding_dim * copies
        assert variant.memory["embeddings"].sum() == pytest.approx(weights, rel=0.05)
    for stage in ("lookup", "gemm"):
        assert getattr(made.plugins.seconds, stage) < getattr(made.plain.seconds, stage), stage
    # Stock copies every table to every rank and sends gradients alone, to 128 ranks less than rows.
    if spec.world_size < 128:
        assert made.plugins.seconds.total < made.plain.seconds.total
    moved = [side.memory["inputs and outputs"].sum() for side in (made.plugins, made.plain)]
    assert moved[0] < moved[1]
    assert f"{spec.world_size} ranks" in text(made)


def test_the_largest_batch(make_registry) -> None:
    spec = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 400_000_000})
    registry = make_registry()
    made = report(registry, spec, None)
    assert made.plain is not None
    variants = {"plugins": with_plugins(registry)}
    variants["plain"] = variants["plugins"].as_plain()
    topology = spec.to_torchrec()
    for name, candidate in variants.items():
        variant = getattr(made, name)
        assert variant.batch_size == variant.largest_batch_size
        for batch_size, fits in (
            (variant.largest_batch_size, True),
            (variant.largest_batch_size + variant.batch_step, False),
        ):
            kept = candidate.activation_bytes(COMPUTE, batch_size)
            assert candidate.fits(topology, batch_size, kept) == fits
            if not fits:
                with pytest.raises(NoPlanError, match="no plan fits"):
                    candidate.plan(topology, batch_size, kept)
        assert variant.memory_by_rank.max() > 0.97 * spec.memory_bytes
    assert made.plugins.largest_batch_size
    assert made.plain.largest_batch_size
    # Per row: activations of 5000 bytes, of which poolings' are divided, and what lookups hold.
    assert made.plugins.largest_batch_size > 1.5 * made.plain.largest_batch_size
    assert "searched in steps of" in text(made)


def test_the_largest_batch_is_one_that_wrappers_hand_out(make_registry, table) -> None:
    sections: dict[str, Any] = {"pooling": [], "sharding": [{"use": "auto"}]}
    sections["dataset"] = with_negatives(table, item="item_0", by="in_request", negatives=2)
    registry = make_registry(**sections, training={"batch_size": 96, "ranks": 2})
    spec = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 10_000_000})
    made = report(registry, spec, None)
    assert made.plain is not None
    for variant in (made.plugins, made.plain):
        assert variant.batch_step is not None
        assert variant.batch_size % 3 == variant.batch_step % (3 * 64) == 0


def test_the_plain_plan_may_not_fit(make_registry) -> None:
    fits = report(make_registry(), load_topology("machine", ranks=2), 2048)
    assert fits.plain is not None
    sides = (fits.plugins, fits.plain)
    used = [side.memory_by_rank.max() - side.memory["reserve"][0] for side in sides]
    between = int((used[0] + 0.2 * (used[1] - used[0])) / 0.85)
    spec = fits.spec.model_copy(update={"ddr_bytes": between})
    made = report(make_registry(), spec, 2048)
    assert made.plain is None
    assert "no plan fits" in made.plain_problem
    assert made.as_json()["plain"] is None
    assert "Without the plugins no plan fits" in text(made)


def test_huge_tables_take_no_memory(make_registry) -> None:
    registry = make_registry(model={"embedding_dim": 128, "num_embeddings": 2**28})
    made = report(registry, load_topology("dgx-h100", nodes=2))
    total = made.plugins.memory["embeddings"].sum()
    assert total == pytest.approx(6 * 2**28 * 128 * 4, rel=0.01)
    assert size_text(total) == "768.0 GiB"
    # One node has no room on its GPUs for all of it.
    made = report(registry, load_topology("dgx-h100"))
    held = made.plugins.memory["embeddings"].sum() + made.plugins.host_memory.sum()
    assert made.plugins.host_memory.any()
    assert held >= 6 * 2**28 * 128 * 4
    assert "tables in the memory of the node" in text(made)
    registry = make_registry(model={"embedding_dim": 128, "num_embeddings": 2**31})
    message = r"no plan fits .* on 8 ranks with 80\.0 GiB each \(15% is reserved\)"
    with pytest.raises(NoPlanError, match=message):
        report(registry, load_topology("dgx-h100"))


def test_json_is_complete(make_registry) -> None:
    made = report(make_registry(), load_topology("zionex-a100-40g")).as_json()
    keys = {"topology", "costs", "wire", "data", "plugins", "plain", "plain_problem"}
    assert made.keys() == keys
    assert made["topology"]["world_size"] == 32
    assert made["data"]["source"] == "the first 4,096 rows"
    assert made["data"]["features"]["usr_0"]["dedupe_factor"] > 1
    variant = made["plugins"]
    by_rank = variant["memory_bytes"]["by_rank"]
    assert variant["memory_bytes"]["max"] == np.sum(list(by_rank.values()), axis=0).max()
    assert variant["seconds"]["total"] == pytest.approx(
        sum(v for stage, v in variant["seconds"].items() if stage != "total")
    )
    assert variant["samples_per_second"] == pytest.approx(32 * 256 / variant["seconds"]["total"])


def test_activations_are_counted(make_registry) -> None:
    registry = make_registry()
    compute, plugins = measure_compute(registry), with_plugins(registry)
    # Six vectors of 16 scalars and their dot products are kept at the least.
    assert compute.rest_saved_bytes > 4 * (6 * 16 + 15)
    kept = plugins.activation_bytes(compute, 512)
    assert kept < plugins.as_plain().activation_bytes(compute, 512)
    assert plugins.activation_bytes(compute, 1024) == pytest.approx(2 * kept, rel=0.05)


class Alone(EmbeddingBagCollection):
    """Of a type that no sharder is for."""


def test_tables_that_torchrecs_own_sharders_take_are_reckoned_with(make_registry) -> None:
    size: Any = {"rows": 1000, "dim": 16}
    weighted = bags("usr_0", weighted=True, **size)
    weights = PositionWeightedModuleCollection({"usr_0": 8})
    modules = {
        "own": bags("item_0", **size),
        "left": FeatureProcessedEmbeddingBagCollection(weighted, weights),
        "alone": Alone(bags("usr_1", **size).embedding_bag_configs()),
    }
    prepared = prepare(make_registry(pooling=[]), nn.ModuleDict(modules))
    candidate = ShardableModel(prepared, prepared.sharders(), prepared.context.data.profile())
    spec = load_topology(MACHINE, ranks=2)
    planned = candidate.plan(spec.to_torchrec(), 256)
    given: Any = {"batch_size": 256, "compute": COMPUTE, "costs": spec.least_costs}
    made = report_side(candidate, planned, spec, **given)
    assert [table.name for table in made.tables] == ["t_item_0", "t_usr_0"]
    assert made.seconds.lookup > 0
