from __future__ import annotations

import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.plugin_files import write_plugins

from recd_plugins.config import TrainingSpec
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.session import KEPT, topology_at_start, write_topology

#: All else is left out, so that of two that measure there is one.
ALONE = {"RECD_ONLY": "recd-plugins-core"}
SLOW = """
from recd_plugins.api import plan_modes, topologies

class Slow(plan_modes.Measurement):
    def cluster(self, device):
        machine = topologies.this_machine(1, nodes=2, device=device)
        return machine.model_copy(update={"inter_node_bandwidth": 12e6})

@hookimpl
def register_measurements():
    return [Slow]
"""


def at_start(rank: int, world_size: int, folder: Path, resume: bool) -> tuple[Any, str]:
    training = {"checkpoint": {"path": str(folder)}} if resume else {}
    with patch.dict(os.environ, ALONE), redirect_stderr(StringIO()) as said:
        spec, plugins = TrainingSpec.model_validate(training), None if resume else folder
        found = topology_at_start(spec, "cpu", 1, resume=resume, plugins_dir=plugins)
    return found, said.getvalue()


def test_a_strangers_measurement_is_planned_for(tmp_path: Path) -> None:
    plugins = write_plugins(tmp_path, SLOW)
    (first, said), (second, nothing) = run_on_ranks(at_start, 2, plugins, False, local_world_size=1)
    assert first == second
    assert first.inter_node_bandwidth == 12e6
    assert said.startswith(
        "measuring the network between 2 nodes\nmeasured 12.0 MB/s per rank between nodes"
    )
    assert not nothing


def test_a_resumed_run_keeps_its_topology_unless_there_are_more_nodes(tmp_path: Path) -> None:
    for nodes in (2, 3):
        here = this_machine(1, nodes=nodes)
        kept = here.model_copy(update={"ddr_bytes": here.ddr_bytes // 2})
        write_topology(tmp_path / KEPT, kept, "Of a test.")
        (first, _), (second, nothing) = run_on_ranks(
            at_start, 2, tmp_path, True, local_world_size=1
        )
        assert first == second == (kept if nodes == 2 else None)
        assert not nothing
