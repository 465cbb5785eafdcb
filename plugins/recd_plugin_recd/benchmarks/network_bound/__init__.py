"""What a step on links of a rate takes at least, however tables are sharded.

Nodes are network namespaces of this machine. Ranks send what a step of ``auto`` on PAPERCAL sends,
each collective as soon as training exactly lets it leave, and compute with torch's operators alone.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from recd_plugins.api import SetupError
from recd_plugins.testing.benchmark import Figure, Findings, Size

SUMMARY = "the least a step takes on nodes that are joined by links: its bytes, torch's operators"
HELP = {
    "nodes": "Nodes of one rank each.",
    "rate": "Of each link, as tc takes it.",
    "row_bytes": "Of rows that a rank sends in a step, in bytes.",
    "gradient_bytes": "Of gradients of rows, of which equal ones are sent once, likewise.",
    "id_bytes": "Of ids, likewise.",
}
_TURNS = {"tiny": (1, 1), "small": (5, 10), "reference": (15, 12)}
_RANKS = "recd_plugin_recd.benchmarks.network_bound.ranks"
_LINES_SHOWN = 15


def workload(
    size: Size,
    *,
    nodes: int = 4,
    rate: str = "200mbit",
    row_bytes: int = 525_000,
    gradient_bytes: int = 185_000,
    id_bytes: int = 170_000,
) -> str:
    """The input in words."""
    turns, steps = _TURNS[size]
    return (
        f"{nodes} nodes of one rank, links of {rate}; a rank sends {row_bytes:,} bytes of rows, "
        f"{gradient_bytes:,} of their gradients, {id_bytes:,} of ids, and reduces "
        f"gradients of PAPERCAL's dense layers, of 128 rows; {turns} turn(s) of {steps} steps"
    )


def run(
    size: Size,
    *,
    nodes: int = 4,
    rate: str = "200mbit",
    row_bytes: int = 525_000,
    gradient_bytes: int = 185_000,
    id_bytes: int = 170_000,
) -> Findings:
    """All kinds of steps in the same ranks, in turns."""
    # Imported here: `recd bench` reads this module for its summary.
    from recd_plugin_recd.benchmarks.network_bound.ranks import Job
    from recd_plugins.testing.shaped_network import ShapedNetwork, unavailable

    if nodes < 2:
        raise SetupError(f"--nodes is {nodes}: links join two nodes or more")
    if (why := unavailable()) is not None:
        raise SetupError(f"recd bench network_bound: {why}")
    turns, steps = _TURNS[size]
    job = Job(row_bytes, gradient_bytes, id_bytes, turns, steps)
    with ShapedNetwork(nodes, rate) as network, tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        found_path = logs / "found"
        command = network.torchrun(
            [_RANKS, json.dumps(asdict(job)), str(found_path)], options=["-m"]
        )
        codes = network.run(command, logs, {"OMP_NUM_THREADS": "1"})
        if any(codes):
            node = next(node for node, code in enumerate(codes) if code)
            last = (logs / f"node{node}.log").read_text(errors="replace").splitlines()
            raise SetupError("\n".join([f"node {node} failed:", *last[-_LINES_SHOWN:]]))
        found: dict[str, list[float]] = json.loads(found_path.read_text(encoding="utf-8"))
    figures = [
        Figure.of(f"{kind}_ms", [1000 * each for each in seconds], unit="ms", better="lower")
        for kind, seconds in found.items()
    ]
    return Findings(
        figures=figures,
        details=[],
        notes=[
            "sends: ranks compute nothing; dense: and dense layers forward and backward; rows: and "
            "rows are looked up, pooled and updated"
        ],
    )
