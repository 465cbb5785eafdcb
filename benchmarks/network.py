"""Training over network links of limited bandwidth, compared to stock TorchRec.

Nodes are network namespaces on this machine (benchmarks/shaped_network.py), which need root and
iproute2. Each combination of workload, nodes and link rate is measured separately; the options
can be repeated. All variants start from the same weights and train in the same ranks, in random
order. A speedup is the median over turns of the ratio within a turn. Plans use measurements of
the simulated cluster. Stock variants use TorchRec's sharders and train loop. TorchRec cannot shard
bags row-wise on CPU. Stock row-wise therefore uses a sharder of recd-plugins, but sends the same
bytes as TorchRec would.
"""

from __future__ import annotations

import json
import math
import pickle
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML

from benchmarks._measure import (
    Detail,
    Figure,
    Findings,
    Size,
    higher,
    lower,
    max_abs_diff,
    ratios,
)
from benchmarks._network_ranks import Job, Measured
from benchmarks._request_table import write_requests
from benchmarks.shaped_network import ShapedNetwork, unavailable
from recd_plugin_recd.models import rm_registry
from recd_plugins.config.from_file import load_registry
from recd_plugins.runtime.errors import SetupError

WORKLOADS, NODES = ("papercal", "rm1", "requests"), ("4x1", "2x2", "4x2", "2x1")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Plans read this many rows, so variants train on the same rows.
_PLANNED_ROWS, _LEAST_BATCHES = 4096, 8
# Maximum batches, minimum turns, steps per turn, seconds for additional turns.
_EFFORTS: dict[Size, tuple[int, int, int, float]] = {
    "tiny": (2, 1, 1, 0.0),
    "small": (16, 3, 4, 90.0),
    "reference": (16, 9, 4, 0.0),
}


@dataclass(frozen=True)
class Variant:
    """One way to train the model.

    Attributes:
        deduplicated: whether batches are deduplicated.
        sequences: sharding of tables whose features are pooled as sequences.
        pooled: sharding of all other tables; None means the same as ``sequences``.
        stock: for baselines, ``own`` for TorchRec's sharders, or ``alike`` for sharders of
            recd-plugins that send the same bytes. Empty for other variants.
    """

    deduplicated: bool
    sequences: dict[str, Any]
    pooled: dict[str, Any] | None = None
    stock: str = ""


def _use(name: str, **options: Any) -> dict[str, Any]:
    return {"use": name, "options": options}


_ROW_WISE, _PLANNER = _use("torchrec.row_wise"), _use("torchrec.planner")
_JOINT, _ALL = _use("flexshard.joint", coalesce=True), _use("torchrec.row_wise", coalesce=True)
SIDES: Mapping[str, Variant] = {
    "stock row-wise": Variant(False, _ROW_WISE, stock="alike"),
    "stock table-wise": Variant(False, _use("torchrec.table_wise"), stock="own"),
    "stock planner": Variant(False, _PLANNER, stock="own"),
    "KJT, joint coalesced + planner": Variant(False, _JOINT, _PLANNER),
    "KJT, row-wise, all coalesced": Variant(False, _ALL),
    "IKJT, planner": Variant(True, _PLANNER),
    "IKJT, joint coalesced + planner": Variant(True, _JOINT, _PLANNER),
    "IKJT, joint, all coalesced": Variant(True, _JOINT, _ALL),
    "KJT, auto": Variant(False, {"use": "auto"}),
    "IKJT, auto": Variant(True, {"use": "auto"}),
}


def _option(name: str, default: Sequence[str], values: Any = None, text: str = "") -> click.Option:
    kind = None if values is None else click.Choice(list(values))
    return click.Option([name], type=kind, multiple=True, default=default, help=text)


OPTIONS = [
    _option("--workload", ["papercal"], WORKLOADS),
    _option("--nodes", ["4x1"], NODES, "Number of nodes x ranks per node."),
    _option("--rate", ["200mbit"], text="Link bandwidth in tc syntax, or unshaped."),
    _option("--side", [], SIDES, "Measure only these variants, and the stock variants."),
]


@dataclass(frozen=True)
class Cell:
    """One combination of workload, nodes x ranks per node, and link rate."""

    workload: str
    nodes: str
    rate: str

    def __str__(self) -> str:
        return f"{self.workload} {self.nodes} {self.rate}"

    def num_ranks(self) -> tuple[int, int]:
        nodes, _, ranks_per_node = self.nodes.partition("x")
        return int(nodes), int(ranks_per_node)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of a link in one direction; infinite if the link is unshaped."""
        if self.rate == "unshaped":
            return math.inf
        return float(self.rate[:-4]) * _UNITS[self.rate[-4:]] / 8

    def rows_and_batch(self, size: Size) -> tuple[int, int]:
        if self.workload == "rm1" and size != "reference":
            # With plain batches of 128, each of four nodes would send 50 MB per step.
            return 4_096, 32
        return 1_024 if size == "tiny" else 16_384, 256 if self.workload == "requests" else 128


def run(
    size: Size,
    workload: Sequence[str] = ("papercal",),
    nodes: Sequence[str] = ("4x1",),
    rate: Sequence[str] = ("200mbit",),
    side: Sequence[str] = (),
) -> Findings:
    if (why := unavailable()) is not None:
        raise SetupError(f"benchmark network: {why}")
    if size == "tiny":
        workload, nodes, rate = ["papercal"], ["2x1"], ["200mbit"]
        side = ["IKJT, joint coalesced + planner"]
    names = [name for name, each in SIDES.items() if each.stock or not side or name in side]
    cells = [Cell(*each) for each in product(workload, nodes, rate)]
    _, turns, steps, _ = _EFFORTS[size]
    found = Findings(
        f"{'; '.join(map(str, cells))}: {len(names)} variants; batches are created in advance and "
        f"repeated; at least {turns} turns of 1 warm-up step and {steps} timed steps",
        [],
    )
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:
            files = _registries(cell, names, Path(folder), size)
            found.add(_findings(cell, _measure(cell, files, size)))
    return found


def _measure(cell: Cell, files: Mapping[str, Path], size: Size) -> dict[str, Measured]:
    batches, turns, steps, seconds = _EFFORTS[size]
    _, batch_size = cell.rows_and_batch(size)
    num_nodes, ranks_per_node = cell.num_ranks()
    planned = _PLANNED_ROWS // (num_nodes * ranks_per_node * batch_size)
    job = Job(
        files,
        frozenset(name for name in files if SIDES[name].stock == "own"),
        frozenset(name for name in files if SIDES[name].stock == "alike"),
        ranks_per_node,
        min(batches, max(_LEAST_BATCHES, planned)),
        turns,
        steps,
        seconds,
    )
    rate = None if cell.rate == "unshaped" else cell.rate
    with ShapedNetwork(num_nodes, rate) as network, tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        (logs / "job").write_bytes(pickle.dumps(job))
        arguments = ["benchmarks._network_ranks", str(logs / "job"), str(logs / "found")]
        command = network.torchrun(arguments, ranks_per_node=ranks_per_node, options=["-m"])
        root = str(Path(__file__).parents[1])
        codes = network.run(command, logs, {"OMP_NUM_THREADS": "1", "PYTHONPATH": root})
        if any(codes):
            node = next(node for node, code in enumerate(codes) if code)
            log = (logs / f"node{node}.log").read_text(errors="replace")
            raise SetupError(f"{cell}: node {node} failed with this log:\n{log[-3000:]}")
        found = json.loads((logs / "found").read_text(encoding="utf-8"))
    return {name: Measured(**each) for name, each in found.items()}


def _findings(cell: Cell, measured: Mapping[str, Measured]) -> Findings:
    notes = [f"{cell}: {n} was not measured: {m.failure}" for n, m in measured.items() if m.failure]
    trained = {name: each for name, each in measured.items() if not each.failure}
    median = {name: statistics.median(each.seconds) for name, each in trained.items()}
    best = min((name for name in trained if SIDES[name].stock), key=median.__getitem__)
    speedups = {n: ratios(trained[best].seconds, each.seconds) for n, each in trained.items()}
    rows: list[list[str | float]] = []
    for name in sorted(trained, key=median.__getitem__):
        sent, speedup = trained[name].link_bytes, statistics.median(speedups[name])
        link = [sent / 1e6, sent / trained[best].link_bytes, 1e3 * sent / cell.bytes_per_second]
        rows.append([name, 1e3 * median[name], speedup, *link])
    headings = ["", "ms per step", "speedup over best stock", "MB per link", "MB over best stock"]
    headings.append("link, ms")
    figures = list(_figures(str(cell).replace(" ", "_"), trained, speedups))
    return Findings("", figures, [Detail(str(cell), headings, rows)], notes)


def _figures(
    cell: str, trained: Mapping[str, Measured], speedups: Mapping[str, list[float]]
) -> Iterator[Figure]:
    """Yield the speedups over the best stock variant, and compare ``auto`` to the best variant."""
    ours = {name: statistics.median(speedups[name]) for name in trained if not SIDES[name].stock}
    fastest = max(ours, key=ours.__getitem__)
    yield higher(f"{cell}_speedup_best", speedups[fastest])
    for name in ours:
        if not name.endswith(", auto"):
            continue
        prefix = f"{cell}_{name.partition(',')[0].lower()}_auto"
        yield higher(f"{prefix}_speedup", speedups[name])
        # For plain batches, compare only to other variants with plain batches.
        others = [
            n for n in ours if n != name and not SIDES[n].deduplicated > SIDES[name].deduplicated
        ]
        if others:
            other = max(others, key=ours.__getitem__)
            yield lower(f"{prefix}_over_best", ratios(speedups[other], speedups[name]))
    # Rounding errors grow after two passes over the same batches.
    curves = [each.losses[: 2 * each.num_batches] for each in trained.values()]
    yield lower(f"{cell}_loss_max_abs_diff", max_abs_diff(curves), "loss", goal=1e-5)


def _registries(cell: Cell, names: Sequence[str], folder: Path, size: Size) -> dict[str, Path]:
    """Write one registry file per variant, and generate the table."""
    files = folder / str(cell).replace(" ", "-")
    files.mkdir()
    document = _document(cell, folder, size)
    plain = files / "plain.yaml"
    plain.write_text(json.dumps(document), encoding="utf-8")
    registry = load_registry(plain)
    registry.dataset.prepare()
    sparse = registry.dataset.schema().sparse
    sequences = [f"t_{feature}" for feature in registry.claim("pooling", sparse)]
    others = [f"t_{feature}" for feature in sparse if f"t_{feature}" not in sequences]
    paths = {}
    for number, name in enumerate(names):
        side = SIDES[name]
        if side.sequences["use"] == "auto":
            sharding = [side.sequences]
        elif side.pooled is None:
            sharding = [{**side.sequences, "tables": ["t_*"]}]
        else:
            sharding = [{**side.sequences, "tables": sequences}, {**side.pooled, "tables": others}]
        values = {
            **document,
            "converter": document["converter"] if side.deduplicated else {"use": "recd.kjt"},
            "sharding": sharding,
            # Stock variants use TorchRec's train loop.
            "training": {**document["training"], "overlap": False if side.stock else None},
        }
        paths[name] = files / f"{number}.yaml"
        paths[name].write_text(json.dumps(values), encoding="utf-8")
    return paths


def _document(cell: Cell, folder: Path, size: Size) -> dict[str, Any]:
    """Return the registry values of a workload with deduplicated batches."""
    rows, batch_size = cell.rows_and_batch(size)
    ranks = math.prod(cell.num_ranks())
    if cell.workload == "requests":
        document = YAML(typ="safe").load(write_requests(folder, rows))
        document["dataset"]["options"]["cache"] = str(folder / "imported")
    else:
        model: Any = cell.workload
        scale = 0.125 if model == "rm1" else 1.0
        text = rm_registry(
            model, folder=folder, rows=rows, scale=scale, batch_size=batch_size, ranks=ranks
        )
        document = YAML(typ="safe").load(text)
    if cell.workload == "papercal":
        # All nodes share the processors, and attention would dominate the step time.
        document["pooling"] = [{"use": "recd.mean", "features": ["seq_*"]}]
    if size == "tiny":
        document["dataset"]["options"]["sparse"] = ["seq_0_0", "seq_0_1", "usr_0", "item_0"]
        document["preprocessing"] = [{**document["preprocessing"][0], "features": ["*"]}]
        document["model"]["tables"] = {"t_*": {"num_embeddings": 100_000}}
    training = {
        "batch_size": batch_size,
        "ranks": ranks,
        "device": "cpu",
        # Small rates: larger ones amplify rounding errors, and losses are compared.
        "learning_rate": 0.1,
        "dense_learning_rate": 0.01,
        "eps": 1e-3,
    }
    return {**document, "training": training}
