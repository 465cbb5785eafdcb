"""SCARS' cache of hot rows compared to no cache: host memory traffic, miss rates and step time.

Trains 26 tables with the cardinalities of Criteo Terabyte. Each sample reads one id per table, by
Zipf's law with exponent 1.1. Embeddings have 64 columns and use row-wise Adagrad. The cache plan
has 256 MiB for rows and optimizer state. ``--scale N`` divides rows, cache and batch size by N,
which keeps all ratios of bytes; scale 1 needs 16 GB. All variants train the same batches from the
same weights. Variant ``plain`` has FBGEMM tables in host memory and counts the embeddings and
gradients that are copied. On the CPU, cache and tables share the same memory, so times show only
the overhead of the cache. Use ``--device cuda`` to measure its benefit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks._measure import (
    DEVICE,
    Detail,
    Device,
    Findings,
    Size,
    check_device,
    higher,
    lower,
    max_abs_diff,
    ratios,
)
from benchmarks._scars_ranks import TRAINING, Job, Trained, Variant, measure
from recd_plugin_scars.planning import CachePlan, TableLoad
from recd_plugins.interfaces.access import TableAccess
from recd_plugins.interfaces.distributions import from_weights
from recd_plugins.runtime.launch import Ranks, backend_for

OPTIONS = [
    click.Option(
        ["--scale"],
        type=click.IntRange(1, 8192),
        help="Divide table rows, cache size and batch size by this number.",
    ),
    DEVICE,
]
#: Number of distinct ids in each table of Criteo Terabyte, with ids modulo 10 million as in
#: DLRM's preprocessing with ``--max-ind-range=10000000``.
CARDINALITIES = (
    *(9_980_333, 36_084, 17_217, 7_378, 20_134, 3, 7_112, 1_442, 61, 9_758_201, 1_333_352),
    *(313_829, 10, 2_208, 11_156, 122, 4, 970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421),
    *(12_420, 101, 36),
)
_DIM, _EXPONENT, _CACHE_BYTES, _BATCH_SIZE = 64, 1.1, 256 * 2**20, 8192
PLAIN, BOTH = "plain", "both"
_SIDES: Mapping[str, Variant] = {
    PLAIN: Variant("host"),
    "coalesced": Variant("cache", cached=False, coalesced=True),
    "cached": Variant("cache"),
    BOTH: Variant("cache", coalesced=True),
    "both, lookahead": Variant("cache", coalesced=True, lookahead=True),
    "both, lfu": Variant("cache", "lfu", coalesced=True),
    "both, lru": Variant("cache", "lru", coalesced=True),
    "stock": Variant("stock"),
}
_CUDA_SIDES: Mapping[str, Variant] = {
    PLAIN: Variant("host"),
    "coalesced": Variant("cache", cached=False, coalesced=True, lookahead=True),
    "cached": Variant("cache", coalesced=True, lookahead=True),
    "uvm": Variant("uvm", "lru", lookahead=True),
}


# Scale, number of batches, untimed batches among them, and turns.
_SIZES: dict[Size, tuple[int, int, int, int]] = {
    "tiny": (64, 75, 1, 1),
    "small": (64, 200, 20, 1),
    "reference": (1, 30, 6, 3),
}


def run(size: Size, scale: int | None = None, device: Device = "cpu") -> Findings:
    check_device(device)
    own_scale, batches, warmup, turns = _SIZES[size]
    scale = scale or own_scale
    tables = f"26 tables like Criteo's; rows, cache and batch divided by {scale}"
    if device == "cuda":
        return _on_cuda(tables, scale)
    batch_size = max(1, _BATCH_SIZE // scale)
    job, plan = _job(scale, batch_size, batches, warmup, device, (64,), (64,))
    trained: dict[str, list[Trained]] = {name: [] for name in _SIDES}
    # On a busy machine, a second thread mostly waits.
    with Ranks(1, threads=1 if size == "tiny" else None) as ranks:
        for _ in range(turns):
            for name, side in _SIDES.items():
                trained[name] += ranks.run(measure, job, side)
    return _findings(f"{tables}; {batches} batches of {batch_size}", trained, plan)


def _findings(workload: str, trained: dict[str, list[Trained]], plan: CachePlan) -> Findings:
    steps = len(trained[PLAIN][0].losses)
    counted = {name: (r[0].bytes_read + r[0].bytes_written) / steps for name, r in trained.items()}
    predicted = {
        name: _predicted(name, side, plan)
        for name, side in _SIDES.items()
        if side.policy == "static" and side.tables != "stock"
    }
    error = max(abs(counted[name] / expected - 1) for name, expected in predicted.items())
    times = {name: [run.step_seconds for run in runs] for name, runs in trained.items()}
    speeds = {name: ratios(times[PLAIN], spent) for name, spent in times.items()}
    losses = [run.losses for runs in trained.values() for run in runs]
    compared = (BOTH, "both, lfu", "both, lru")
    policies = {_SIDES[side].policy: trained[side][0].traffic for side in compared}
    figures = [
        higher("backing_store_traffic_reduction", counted[PLAIN] / counted[BOTH], goal=30),
        lower("prediction_error", error, goal=0.02),
        *(
            lower(f"miss_rate_{policy}", traffic.misses / traffic.unique_rows)
            for policy, traffic in policies.items()
        ),
        *(
            higher(f"samples_per_second_{name.replace(', ', '_')}_over_plain", each)
            for name, each in speeds.items()
            if name != PLAIN
        ),
        lower("loss_max_abs_diff", max_abs_diff(losses), "loss", goal=1e-6),
    ]
    rows: list[list[str | float]] = []
    for name, (first, *_) in trained.items():
        traffic, moved = first.traffic, (first.bytes_read / 1e6, first.bytes_written / 1e6)
        sums = *moved, traffic.unique_rows, traffic.misses
        read, written, looked_up, missed = (each / steps for each in sums)
        expected, spent = predicted.get(name, 0.0) / 1e6, 1e3 * statistics.median(times[name])
        rows.append([name, read, written, expected, looked_up, missed, spent])
    headings = ["", "MB read", "MB written", "MB predicted", "rows", "misses", "ms"]
    return Findings(workload, figures, [Detail("host memory traffic per step", headings, rows)])


def _predicted(name: str, side: Variant, plan: CachePlan) -> float:
    """Return the predicted bytes that one step reads from and writes to host memory.

    A cache moves each row at most once per batch, even if ids are not deduplicated.
    """
    of_side = CachePlan.of(
        {table: each.load for table, each in plan.tables.items()},
        {table: each.cached for table, each in plan.tables.items()} if side.cached else {},
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        held=float(side.lookahead),
    )
    traffic = [table.traffic for table in of_side.tables.values()]
    if name == PLAIN:
        # Only embeddings and gradients move; optimizer state stays on the host.
        return sum(2 * table.lookups * table.weight_bytes for table in traffic)
    return sum(table.bytes for table in traffic)


def _on_cuda(tables: str, scale: int) -> Findings:
    """Train the CUDA variants with two batch sizes and wide dense layers."""
    figures, rows, differences = [], list[list[str | float]](), []
    with Ranks(1, backend=backend_for("cuda")) as ranks:
        for batch_size in (8192, 16384):
            job, _ = _job(scale, batch_size // scale, 40, 10, "cuda", (512, 256), (512, 512, 256))
            runs = {name: ranks.run(measure, job, side)[0] for name, side in _CUDA_SIDES.items()}
            for name, run in runs.items():
                moved = (run.bytes_read + run.bytes_written) / len(run.losses) / 1e6
                rows.append([f"{name}, batch {batch_size}", 1e3 * run.step_seconds, moved])
                if name != PLAIN:
                    speedup = runs[PLAIN].step_seconds / run.step_seconds
                    paper = "up to 6" if name == "cached" else None
                    figures.append(
                        higher(f"speedup_{name}_batch_{batch_size}", speedup, paper=paper)
                    )
            differences.append(max_abs_diff([run.losses for run in runs.values()]))
    figures.append(lower("loss_max_abs_diff", max(differences), "loss", goal=1e-6))
    headings = ["", "ms", "MB to and from host"]
    return Findings(tables, figures, [Detail("training on one device", headings, rows)])


def _job(
    scale: int,
    batch_size: int,
    batches: int,
    warmup: int,
    device: Device,
    bottom: tuple[int, ...],
    top: tuple[int, ...],
) -> tuple[Job, CachePlan]:
    """Draw the batches of a job and plan its cache."""
    rng = np.random.default_rng((0, 1))
    loads, ids, rows = {}, [], {}
    for access in _accesses(scale):
        loads[access.table] = TableLoad(access, _DIM)
        rows[access.table] = access.num_embeddings
        ids.append(_draw(access, rng, batches, batch_size))
    plan = CachePlan.within(
        loads, _CACHE_BYTES // scale, batch_size=batch_size, optimizer=TRAINING.optimizer
    )
    hot = {name: each.load.hot_rows(each.cached).copy() for name, each in plan.tables.items()}
    return Job(rows, _DIM, bottom, top, np.stack(ids, 1), hot, warmup, device), plan


def _accesses(scale: int) -> Iterator[TableAccess]:
    """Yield the access frequencies of each table, by Zipf's law."""
    for number, rows in enumerate(CARDINALITIES):
        weights = np.arange(1, rows + 1, dtype=np.float64) ** -_EXPONENT
        if scale > 1:
            weights = np.add.reduceat(weights, np.arange(0, rows, scale))
        feature = f"cat_{number}"
        yield from_weights(f"t_{feature}", weights, 1.0, seed=number, features=(feature,))


def _draw(
    access: TableAccess, rng: np.random.Generator, batches: int, batch_size: int
) -> NDArray[np.int64]:
    """Draw ids of a table, int64 ``[batches, batch_size]``."""
    cumulative = np.cumsum(access.accesses)
    at = rng.random(batches * batch_size)
    # Searching in sorted order reads memory sequentially, which is several times faster.
    order = np.argsort(at)
    ids = np.empty(len(at), dtype=np.int64)
    places = np.searchsorted(cumulative[:-1], at[order] * cumulative[-1], side="right")
    ids[order] = access.rows[places]
    return ids.reshape(batches, batch_size)
