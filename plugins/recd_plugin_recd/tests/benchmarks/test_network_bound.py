"""``recd bench network_bound``: its figures, on two nodes; and what two ranks send in a step."""

from __future__ import annotations

import pytest

from recd_plugin_recd.benchmarks import network_bound
from recd_plugin_recd.benchmarks.network_bound.ranks import Job, Steps
from recd_plugins.api import SetupError
from recd_plugins.api.distributed import CollectiveBytes
from recd_plugins.testing import shaped_network
from recd_plugins.testing.gloo import run_on_ranks

# Of PAPERCAL's dense layers: 13 x 64 x 16, and 836 x 128 x 64 x 1.
_WEIGHTS = (13 + 1) * 64 + (64 + 1) * 16 + (836 + 1) * 128 + (128 + 1) * 64 + 64 + 1


@pytest.mark.skipif(shaped_network.unavailable() is not None, reason="needs root and iproute2")
def test_each_kind_of_step_is_measured() -> None:
    found = network_bound.run(
        "tiny", nodes=2, rate="1gbit", row_bytes=64_000, gradient_bytes=32_000, id_bytes=8_000
    )
    assert [each.figure for each in found.figures] == ["sends_ms", "dense_ms", "rows_ms"]
    assert all(each.value > 0 for each in found.figures)
    assert "2 nodes of one rank, links of 1gbit" in network_bound.workload(
        "tiny", nodes=2, rate="1gbit"
    )


def sent(rank: int, world_size: int) -> list[dict[str, float]]:
    """Payload of a step of each kind, by collective."""
    steps = Steps(Job(row_bytes=64_000, gradient_bytes=32_000, id_bytes=8_000, turns=1, steps=1))
    found = []
    for step in (steps.sends, steps.dense, steps.rows):
        with CollectiveBytes() as counter:
            step()
        by_name: dict[str, float] = {}
        for traffic, num_bytes in counter.sent.items():
            by_name[traffic.kind] = by_name.get(traffic.kind, 0) + num_bytes
        found.append(by_name)
    return found


def test_all_kinds_send_what_they_are_told() -> None:
    for found in run_on_ranks(sent, 2):
        assert found[0] == found[1] == found[2]
        assert found[0]["all_to_all"] == 64_000 + 32_000 + 8_000
        assert found[0]["all_reduce"] == pytest.approx(4 * _WEIGHTS, rel=0.01)


def test_without_networks_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="--nodes is 1: links join two"):
        network_bound.run("tiny", nodes=1)
    monkeypatch.setattr(shaped_network, "unavailable", lambda: "no root")
    with pytest.raises(SetupError, match="recd bench network_bound: no root"):
        network_bound.run("tiny")
