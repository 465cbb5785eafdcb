from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces.step_cost import GemmCost, StageCosts
from recd_plugins.planning.topologies import (
    MACHINE,
    load_topology,
    machine_of,
    read_topology,
    topology_names,
)
from recd_plugins.runtime.errors import RecdError, RegistryError, SetupError
from recd_plugins.training.session import write_topology

OWN = """
device: cpu
ranks_per_node: 4
nodes: 2
ddr_bytes: 1000000
ddr_bandwidth: 4.0e+9
intra_node_bandwidth: 2.0e+9
inter_node_bandwidth: 1.0e+9
flops: 1.0e+9
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", topology_names())
def test_torchrec_gets_its_units(name: str) -> None:
    spec = load_topology(name, nodes=3, ranks=2)
    topology = spec.to_torchrec()
    assert topology.world_size == spec.world_size == 3 * spec.ranks_per_node
    assert topology.local_world_size == spec.ranks_per_node
    assert topology.intra_host_bw == spec.intra_node_bandwidth / 1000  # bytes a millisecond
    assert topology.inter_host_bw == spec.inter_node_bandwidth / 1000
    assert topology.ddr_mem_bw == spec.ddr_bandwidth / 1000
    storage = topology.devices[0].storage
    assert spec.memory_bytes == (storage.ddr if spec.device == "cpu" else storage.hbm)
    if spec.hbm_bandwidth is not None:
        assert topology.hbm_mem_bw == spec.hbm_bandwidth / 1000


def test_nodes_and_ranks_stand_in_for_the_topologys_own(own: Path) -> None:
    assert load_topology("zionex-a100-40g").nodes == 4
    assert load_topology("zionex-a100-40g", nodes=16, ranks_per_node=4).world_size == 64
    with pytest.raises(RecdError, match=r"a node of topology 'dgx-h100' has 8 GPUs.* 9 ranks"):
        load_topology("dgx-h100", ranks_per_node=9)
    # Ranks of a CPU share what their node has.
    half = load_topology(str(own), ranks_per_node=8)
    assert (half.world_size, half.ddr_bytes, half.flops) == (16, 500000, 5e8)
    assert load_topology(MACHINE, ranks=4).ddr_bytes == load_topology(MACHINE).ddr_bytes // 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgx-h1000", r"no topology is named 'dgx-h1000'. Did you mean 'dgx-h100'\?"),
        ("nothing", r"'nothing'\. Known topologies: 'dgx-a100-80g', .* end in \.yaml"),
    ],
)
def test_a_name_that_nobody_knows(name: str, message: str) -> None:
    with pytest.raises(RecdError, match=message):
        load_topology(name)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nodes: 2", "nodes: two", r"own.yaml:4 nodes: .*integer, got 'two'"),
        ("nodes: 2", "node: 2", r"own.yaml:4 node: unknown key of a topology. Did you mean 'nodes"),
        (
            "device: cpu",
            "device: cuda",
            r"device: cuda needs the keys 'hbm_bytes', 'hbm_bandwidth', 'hbm_to",
        ),
        ("nodes: 2", "nodes: [", r"own.yaml:\d+: the text is not valid YAML"),
        ("nodes: 2", "costs: {gemm: {flops: 1}}", r"own.yaml:4 costs.gemm.flops: unknown key"),
    ],
)
def test_what_is_wrong_with_a_file(own: Path, before: str, after: str, message: str) -> None:
    own.write_text(OWN.replace(before, after), encoding="utf-8")
    with pytest.raises(RegistryError, match=message):
        load_topology(str(own))


def rates(**spec: float | str) -> dict[str, float]:
    found = load_topology("dgx-a100-80g").model_copy(update=spec).collective_rates
    return {name: rate.bytes_per_second for name, rate in found}


def test_collectives_of_links() -> None:
    """4 nodes of 8 ranks: 24 of 32 parts of an all-to-all cross, 7 stay in the node."""
    links = {"nodes": 4, "intra_node_bandwidth": 300e9, "inter_node_bandwidth": 25e9}
    assert rates(**links) == pytest.approx(
        {
            "a2a_global": 25e9 * 32 / 24,
            "a2a_intra": 300e9 * 8 / 7,
            "ar_global": 25e9 * 32 / 6,
            "ar_cross": 25e9 * 4 / 6,
        }
    )
    one_node = rates(nodes=1, intra_node_bandwidth=300e9)
    assert one_node["a2a_global"] == one_node["a2a_intra"] == pytest.approx(300e9 * 8 / 7)
    assert one_node["ar_global"] == pytest.approx(300e9 * 8 / 14)
    # A rank alone sends nothing; what it then takes is finite all the same.
    assert all(0 < rate < 1e12 for rate in rates(nodes=1, ranks_per_node=1).values())


def test_zionex_has_what_its_collectives_reached() -> None:
    collectives = load_topology("zionex-a100-40g").collective_rates
    assert collectives.a2a_global.bytes_per_second == 25.6e9
    assert collectives.ar_cross.seconds == 1.8e-3


def test_a_topology_that_was_written_reads_the_same(own: Path, tmp_path: Path) -> None:
    costs = StageCosts(gemm=GemmCost(steps=1e-3, matmul_flops=2e-11))
    spec, written = read_topology(own), tmp_path / "folder" / "written.yaml"
    spec = spec.model_copy(update={"costs": costs, "collectives": spec.link_rates})
    write_topology(written, spec, "Where it comes from.")
    assert read_topology(written) == spec
    text = written.read_text()
    for end in range(len(text.strip()) - 1, 0, -17):
        written.write_text(text[:end])
        with pytest.raises(RecdError, match=r"written\.yaml"):
            read_topology(written)


def test_ranks_that_run_have_the_figures_of_the_named_file(own: Path) -> None:
    training = TrainingSpec(ranks=4, ranks_per_node=2, topology=str(own))
    found = machine_of(training)  # a description without measurements holds for any ranks
    assert (found.nodes, found.ranks_per_node, found.ddr_bytes) == (2, 2, 2_000_000)
    assert found.inter_node_bandwidth == 1e9
    with pytest.raises(SetupError, match="has ranks on cuda, but this run trains on cpu"):
        machine_of(TrainingSpec(ranks=8, topology="dgx-h100"))
    assert machine_of(TrainingSpec(ranks=2, topology=MACHINE)) == machine_of(TrainingSpec(ranks=2))


def test_keys_of_dropped_cost_terms_are_ignored(own: Path) -> None:
    old = "costs: {lookup: {tables_looked_up: 1.0e-9, lookups: 2.0e-6}}\n"
    own.write_text(OWN + old, encoding="utf-8")
    costs = load_topology(str(own)).costs
    assert costs.lookup.lookups == 2e-6
