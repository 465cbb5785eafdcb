"""What is measured of a cluster, and the topology that it makes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.commands import invoke, recd, refusal

from recd_plugin_tuning.cluster import MeasuredCluster
from recd_plugin_tuning.collectives import fit_rate
from recd_plugin_tuning.rank_work import QUICK, goes_on
from recd_plugin_tuning.tests import cluster_cases
from recd_plugins.planning.topologies import read_topology
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.session import KEPT

CPU = torch.device("cpu")
SIZES = (2**12, 2**16, 2**20, 2**22)


@pytest.fixture(scope="module")
def measured() -> MeasuredCluster:
    return run_on_ranks(cluster_cases.measured, 2, local_world_size=1)[0]


def test_latency_and_bandwidth_are_found_again() -> None:
    rate = fit_rate({size: 2e-3 + size / 5e8 for size in SIZES})
    assert rate.seconds == pytest.approx(2e-3)
    assert rate.bytes_per_second == pytest.approx(5e8)
    # What a limited link lets through at once takes no time, and hides no bandwidth.
    free = fit_rate({size: 2e-3 + max(0, size - 2**17) / 5e8 for size in SIZES[1:]})
    assert free.bytes_per_second == pytest.approx(5e8, rel=0.05)
    # Where the bytes make no difference, the largest still took some time.
    flat = fit_rate(dict.fromkeys(SIZES, 1e-3))
    assert flat.bytes_per_second == pytest.approx(SIZES[-1] / 1e-3)
    assert flat.seconds == 1e-3


def test_costs_are_of_what_leaves_a_rank(measured: MeasuredCluster) -> None:
    spec = measured.spec
    assert (spec.nodes, spec.ranks_per_node, spec.device) == (2, 1, "cpu")
    costs, rates = spec.costs, spec.collectives
    # Half of what a rank puts in goes to the other one.
    sent = 2 / rates.a2a_global.bytes_per_second
    assert costs.all_to_all.bytes_across_nodes == pytest.approx(sent)
    assert spec.inter_node_bandwidth == pytest.approx(1 / sent)
    # In a step of a sharded module, which has sizes to send and Python to run.
    assert costs.all_to_all.collectives == measured.collective > 0
    # Each sends as much as it reduces, 2 (n - 1) / n.
    assert costs.all_reduce.bytes_reduced == pytest.approx(1 / rates.ar_global.bytes_per_second)
    assert costs.gemm.matmul_flops > 0
    assert costs.lookup.rows_updated + costs.lookup.ids_looked_up > 0
    assert costs.other.operators > 0


def test_what_a_step_takes_is_without_its_all_reduce(measured: MeasuredCluster) -> None:
    reduced = {size: 2e-3 + size / 5e8 for size in SIZES}
    sweeps = {**measured.sweeps, "ar_global": reduced}
    for dense, beside_it in ((5e-3, 3e-3), (1e-3, 0.0)):
        costs = replace(measured, sweeps=sweeps, dense=dense).spec.costs
        assert costs.all_reduce.steps == pytest.approx(2e-3)
        assert costs.other.steps == pytest.approx(beside_it)


def test_the_command_writes_what_training_takes(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, measured: MeasuredCluster
) -> None:
    monkeypatch.setattr("recd_plugins.runtime.launch.launch", lambda *_, **__: [measured])
    said = recd("calibrate", "-o", "cluster.yaml", "--ranks", "2", "--json", "all.json")
    for words in ("all-reduce", "matrix products", "GFLOP/s"):
        assert words in said
    report = json.loads((cwd / "all.json").read_text())
    assert [each["bytes"] for each in report["collectives"]["ar_global"]] == [1024, 4096, 16384]
    written = read_topology(Path("cluster.yaml"))
    assert written.model_dump(exclude_none=True) == measured.spec.model_dump(exclude_none=True)
    assert "cluster.yaml already exists" in refusal("calibrate", "-o", "cluster.yaml")
    assert "topology file must end in .yaml" in refusal("calibrate", "-o", "cluster.txt")
    assert not Path("cluster.txt").exists()
    recd("calibrate", "-o", "cluster.yaml", "--force")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--ranks", "3", "--ranks-per-node", "2"], {}, "3 cannot be divided into nodes of 2"),
        (["-o", "/proc/cluster.yaml"], {}, "/proc/cluster.yaml: the file cannot be written"),
        (["--ranks", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun sets the number of ranks"),
        (["--ranks-per-node", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "and --ranks-per-node"),
        (["--device", "cuda"], {}, "--device cuda: "),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    cwd: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    output = [] if "-o" in arguments else ["-o", "cluster.yaml"]
    result = invoke("calibrate", *output, *arguments, env=environment)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not (cwd / "cluster.yaml").exists()


def test_what_ranks_wait_for_one_another_s_cores_counts() -> None:
    (seconds,) = run_on_ranks(cluster_cases.waits_each_third_time, 1)
    # Two of three rounds take no time, as those of ranks that are alone on a core do.
    assert seconds >= cluster_cases.WAITED / 3


def test_who_is_done_leaves_no_core_to_the_others() -> None:
    quick, slow = run_on_ranks(cluster_cases.goes_on_until_all_are_done, 2)
    # A rank makes three rounds at least, of which one of the slow rank takes 60 of the quick one.
    assert slow >= 3
    assert quick >= 3 * slow


_STOPS = """
import os, signal, sys
from recd_plugin_tuning import calibrate as commands
from recd_plugin_tuning import cluster
commands._NOTICE, commands._HANG = 1.0, 3.0
def stop(*args):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return measure_work(*args)
measure_work, cluster.measure_work = cluster.measure_work, stop
from recd_plugins.cli import main
main(["calibrate", "-o", sys.argv[1], "--quick"])
"""


def test_a_stopped_rank_is_named_and_ends_all(tmp_path: Path) -> None:
    output = tmp_path / "cluster.yaml"
    done = forked.torchrun([sys.executable, "-c", _STOPS, output], ranks=2)
    assert done.returncode == 1
    assert re.search(
        r"the run has made no progress for \d s: rank 0 waits .* for rank 1, which sends no "
        r"heartbeats \(process \d+ of .*\)\. This exceeds hang_timeout \(3 s\), so the run ends\. "
        "Nothing was written",
        done.stderr,
    )
    assert not output.exists()


def test_a_run_on_several_nodes_measures_them_once(tmp_path: Path) -> None:
    ranks = run_on_ranks(cluster_cases.at_start, 2, str(tmp_path), local_world_size=1)
    (found, again, named, alone), measurements = ranks[0]
    assert measurements == 1
    assert found == again  # of the file beside the checkpoints
    assert (found.nodes, found.ranks_per_node) == (2, 1)
    assert found.costs is not None
    assert named is None
    assert alone is None
    assert ranks[1][0] == ranks[0][0]
    assert (tmp_path / KEPT).exists()


def test_small_sizes_do_not_end_a_sweep() -> None:
    """What they take is latency: it was taken for bandwidth, and nothing else was measured."""
    assert goes_on(1 << 17, 256, 2e-3, QUICK)
    assert goes_on(1 << 17, 256, 0.8, QUICK)  # beside other load
    assert goes_on(1 << 20, 1 << 19, 0.02, QUICK)
    assert not goes_on(1 << 22, 1 << 20, 0.2, QUICK)
