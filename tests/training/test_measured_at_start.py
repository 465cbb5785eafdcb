"""A run on several nodes is planned for what a package measures at its start."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from recd_plugins.config import TrainingSpec
from recd_plugins.planning.topologies import TopologySpec, this_machine
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.session import KEPT, topology_at_start, write_topology

#: All else is left out, so that of two that measure there is one.
ALONE = {"RECD_ONLY": "recd-plugins-core"}
#: A measurement of the bandwidth from each rank to the next.
RING = """
import time

from recd_plugins.api import hookimpl, plan_modes


class Ring(plan_modes.Measurement):
    def cluster(self, device):
        import torch
        import torch.distributed as dist
        from recd_plugins.api import rank_agreement
        from recd_plugins.api import topologies

        ranks, per_node = dist.get_world_size(), rank_agreement.ranks_of_each_node()
        sent, found = torch.zeros(1 << 18, device=device), [0.0] * ranks
        received, start = torch.empty_like(sent), time.monotonic()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (dist.get_rank() + 1) % ranks),
                dist.P2POp(dist.irecv, received, (dist.get_rank() - 1) % ranks),
            ]
        ):
            work.wait()
        dist.all_gather_object(found, sent.nbytes / (time.monotonic() - start))
        bandwidth = {"intra_node_bandwidth": min(found), "inter_node_bandwidth": min(found)}
        machine = topologies.this_machine(per_node, nodes=ranks // per_node, device=device)
        return machine.model_copy(update=bandwidth)


@hookimpl
def register_measurements():
    return [Ring]
"""


def at_start(
    rank: int, world_size: int, plugins_dir: str | None
) -> tuple[TopologySpec | None, str]:
    folder = None if plugins_dir is None else Path(plugins_dir)
    with patch.dict(os.environ, ALONE), redirect_stderr(StringIO()) as said:
        found = topology_at_start(TrainingSpec(), "cpu", 1, resume=False, plugins_dir=folder)
    return found, said.getvalue()


def resumed(rank: int, world_size: int, folder: Path) -> tuple[TopologySpec | None, str]:
    training = TrainingSpec.model_validate({"checkpoint": {"path": str(folder)}})
    with patch.dict(os.environ, ALONE), redirect_stderr(StringIO()) as said:
        found = topology_at_start(training, "cpu", 1, resume=True)
    return found, said.getvalue()


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    (tmp_path / "acme.py").write_text(RING, encoding="utf-8")
    return tmp_path


def test_a_strangers_measurement_is_planned_for(acme: Path) -> None:
    (first, said), (second, nothing) = run_on_ranks(at_start, 2, str(acme), local_world_size=1)
    assert first is not None
    assert first == second
    assert first.inter_node_bandwidth == first.intra_node_bandwidth
    assert said.startswith("measuring 2 nodes first\n")
    assert f"{first.inter_node_bandwidth / 1e6:,.1f} MB/s of a rank between them" in said
    assert not nothing


def test_where_nothing_measures_it_is_said_what_is_assumed() -> None:
    (first, said), (second, nothing) = run_on_ranks(at_start, 2, None, local_world_size=1)
    assert first is second is None
    assert "no installed plugin measures the 2 nodes: tables are planned for" in said
    assert not nothing


def test_a_resumed_run_keeps_its_topology_unless_there_are_more_nodes(tmp_path: Path) -> None:
    for nodes in (2, 3):
        here = this_machine(1, nodes=nodes)
        kept = here.model_copy(update={"ddr_bytes": here.ddr_bytes // 2})
        write_topology(tmp_path / KEPT, kept, "Of a test.")
        (first, _), (second, nothing) = run_on_ranks(resumed, 2, tmp_path, local_world_size=1)
        assert first == second == (kept if nodes == 2 else None)
        assert not nothing
