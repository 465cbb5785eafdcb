"""What steps and fetched bytes cost: fitted, assumed, and for several ranks."""

from __future__ import annotations

from recd_plugin_scars.planning.plan import CacheRates, rates_of
from recd_plugins.planning.topologies import load_topology, topology_of


def test_assumed_rates_are_bounds_of_the_link_between_the_tiers() -> None:
    spec = load_topology("dgx-a100-80g")
    assert spec.hbm_to_ddr_bandwidth is not None
    assert rates_of(spec).byte_seconds == 2 / spec.hbm_to_ddr_bandwidth
    measured = CacheRates(sample_seconds=1e-6, step_seconds=1e-3, byte_seconds=1e-9)
    assert rates_of(topology_of({**dict(spec), "cache": measured})) == measured


def test_an_iteration_takes_the_time_of_all_ranks() -> None:
    costs = CacheRates(sample_seconds=1e-6, step_seconds=1e-3, byte_seconds=1e-9).costs(8)
    assert (costs.sample, costs.step, costs.byte) == (1e-6, 8e-3, 1e-9)
