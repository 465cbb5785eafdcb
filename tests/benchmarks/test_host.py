"""Counts of launches, syncs and operators per training step stay below their ceilings."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.host import VARIANTS, Counted, HostDevice, count_variant

from recd_plugins.runtime.launch import launch

#: Lower a ceiling when a change lowers the count. A higher count needs a reason.
CEILINGS: dict[str, dict[str, float]] = {
    "demo_dedup": {"launches": 96, "dispatched": 184, "syncs": 0},
    "demo_coalesced": {"launches": 140, "syncs": 2},
    "two_ranks": {"launches": 136, "syncs": 1},
    "two_tier": {"launches": 243, "syncs": 5, "backward_syncs": 0},
    "scars_cached": {"launches": 61, "dispatched": 85, "syncs": 0},
    "scars_coalesced": {"launches": 87, "syncs": 1},
    "scars_static": {"launches": 40, "dispatched": 162, "syncs": 2},
}


@pytest.mark.parametrize("name", list(CEILINGS))
def test_counts_stay_below_their_ceilings(name: str, tmp_path: Path) -> None:
    def count(device: HostDevice) -> Counted:
        job = VARIANTS[name], device, str(tmp_path), 64
        return launch(count_variant, VARIANTS[name].ranks, *job, threads=1)[0]

    fake, cpu = count("fake-cuda"), count("cpu")
    found = {}
    for what in CEILINGS[name]:
        phase, _, kind = what.rpartition("_")
        found[what] = fake.by_phase[kind].get(phase or "all", 0.0)
    places = [line for line in fake.places if line.startswith("sync")]
    above = {what: n for what, n in found.items() if n > CEILINGS[name][what]}
    assert not above, "\n".join([f"{name}: {found}, ceilings {CEILINGS[name]}", *places])
    assert fake.losses == pytest.approx(cpu.losses[: len(fake.losses)], abs=1e-6)
