"""A measurement of somebody else's may have the section of this package."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from recd_plugin_flexshard.table_plan import SECTION, TierMemory
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.registry import TrainingSpec
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.measured_at_start import topology_at_start

ACME = """
from recd_plugins.api import Measurement, hookimpl

class Tiers(Measurement):
    def cluster(self, device):
        from recd_plugin_flexshard.table_plan import SECTION, TierMemory
        from recd_plugins.api import this_machine

        memory = TierMemory(memory_multiplier=2.5, saved_activations=0.5)
        return this_machine(1, nodes=2).with_section(SECTION, memory)

@hookimpl
def register_measurements():
    return [Tiers]
"""


def at_start(rank: int, world_size: int, folder: Path) -> list[TopologySpec | None]:
    """What a run is planned for, and what it is when it goes on."""
    training = TrainingSpec.model_validate({"checkpoint": {"path": str(folder / "kept")}})
    # Without the packages that measure, too.
    with patch.dict(os.environ, {"RECD_ONLY": "flexshard"}), redirect_stderr(StringIO()):
        return [
            topology_at_start(training, "cpu", 1, resume=resume, plugins_dir=folder / "plugins")
            for resume in (False, True)
        ]


def test_a_section_is_planned_for(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(ACME, encoding="utf-8")
    for specs in run_on_ranks(at_start, 2, tmp_path, local_world_size=1):
        for spec in specs:
            assert spec is not None
            assert spec.sections[SECTION] == TierMemory(
                memory_multiplier=2.5, saved_activations=0.5
            )
