"""Training on one device: tables on the host, cached ones, and FBGEMM's UVM caching (SCARS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from recd_plugin_scars.benchmarks.cells import PlannedBatches, criteo_shape, prepare
from recd_plugin_scars.benchmarks.criteo import ScaledCriteo
from recd_plugin_scars.benchmarks.trainers import Job, Side, Trained, measure
from recd_plugins.api.distributed import Ranks, backend_for
from recd_plugins.testing.benchmark import Detail, Figure, largest

HOST, CACHED, UVM = "host", "cached", "uvm"
_SIDES: Mapping[str, Side] = {
    HOST: Side("host"),
    "coalesced": Side("cache", cached=False, coalesced=True, lookahead=True),
    CACHED: Side("cache", coalesced=True, lookahead=True),
    UVM: Side("uvm"),
}
# Of each cached row of the plan, as many are cached: fewer, and all that the bytes allow.
_SHARES = (0.25, 1.0)


@dataclass(frozen=True)
class DeviceWorkload:
    """What is trained.

    Attributes:
        scale: rows, cache and batches are fewer by it.
        batch_sizes: samples, before they are scaled.
        num_batches: of each run.
        warmup: of them, not timed.
        bottom, top: widths of the dense layers.
    """

    scale: int
    batch_sizes: tuple[int, ...] = (8192, 16384)
    num_batches: int = 40
    warmup: int = 10
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 512, 256)


@dataclass(frozen=True)
class OnDevice:
    """What was measured: runs by batch size and side."""

    workload: DeviceWorkload
    trained: Mapping[int, Mapping[str, Trained]]

    def figures(self) -> list[Figure]:
        """Samples a second over tables on the host, and losses."""
        figures = []
        differences = []
        for batch_size, sides in self.trained.items():
            for name, run in sides.items():
                if name == HOST:
                    continue
                figures.append(
                    Figure.of(
                        f"speedup_{name.replace(' ', '_')}_batch_{batch_size}",
                        [sides[HOST].step_seconds / run.step_seconds],
                        unit="ratio",
                        better="higher",
                        paper="up to 6" if name == CACHED else None,
                        goal=6 if name == CACHED else None,
                    )
                )
                losses = np.array(run.losses) - np.array(sides[HOST].losses)
                differences.append(float(np.abs(losses).max()))
        return [
            *figures,
            Figure.of("loss_max_abs_diff", [largest(differences)], unit="loss", better="lower"),
        ]

    def details(self) -> list[Detail]:
        """A row of each side and batch size."""
        rows: list[list[str | float]] = [
            [
                f"{name}, batch {batch_size}",
                1e3 * run.step_seconds,
                batch_size / self.workload.scale / run.step_seconds,
                run.bytes / len(run.losses) / 1e6 if run.bytes else "",
            ]
            for batch_size, sides in self.trained.items()
            for name, run in sides.items()
        ]
        return [
            Detail("training on one device", ["", "ms", "samples/s", "MB to and from host"], rows)
        ]


def measure_on_device(
    workload: DeviceWorkload, device: str, threads: int | None = None
) -> OnDevice:
    """Train all sides at each batch size, one after the other; UVM caching on CUDA alone.

    Args:
        workload: what is trained.
        device: ``cpu`` or ``cuda``.
        threads: torch's; all cores without it.
    """
    trained = {}
    with Ranks(1, backend=backend_for(device), threads=threads) as ranks:
        for batch_size in workload.batch_sizes:
            job = _prepared(workload, batch_size, device).job
            runs = {
                name: (job, side)
                for name, side in _SIDES.items()
                if side.tables != "uvm" or device == "cuda"
            }
            for share in _SHARES[:-1]:
                runs[f"{CACHED} {share:.0%}"] = _with_share(job, share), _SIDES[CACHED]
            trained[batch_size] = {
                name: ranks.run(measure, *arguments)[0] for name, arguments in runs.items()
            }
    return OnDevice(workload, trained)


def _prepared(workload: DeviceWorkload, batch_size: int, device: str) -> PlannedBatches:
    criteo = ScaledCriteo(workload.scale, full_batch_size=batch_size)
    shape = criteo_shape(criteo, workload.bottom, workload.top)
    return prepare(criteo, workload.num_batches, workload.warmup, shape, device)


def _with_share(job: Job, share: float) -> Job:
    """The same with fewer cached rows of each table."""
    return replace(
        job,
        hot_rows={table: rows[: round(share * len(rows))] for table, rows in job.hot_rows.items()},
    )
