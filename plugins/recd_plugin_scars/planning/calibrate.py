"""Measures the costs of a step, a sample and a fetched byte on this machine.

Steps of the registry's model without caches are timed at several batch sizes: the line through them
starts at tau. The slope of moves of rows over their bytes is the cost of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from recd_plugin_scars.planning.plan import SECTION, CacheRates
from recd_plugin_scars.runtime.stores import BackingStore, RowMover
from recd_plugins.api import (
    Job,
    RunConfig,
    assemble,
    backend_for,
    build_model,
    devices,
    imports,
    launch,
    model_tables,
    sessions,
    step_costs,
    topologies,
)

# Of the registry's batch size.
_PARTS = (8, 4, 2, 1)
_ROUNDS, _LEAD, _MEASURED = 3, 2, 3
# Rows that are moved at once, of a store that no cache of a processor holds.
_MOVED = (1 << 10, 1 << 12, 1 << 14)
_STORE_BYTES, _MOVES = 1 << 27, 8
# Below this a time is lost in the noise.
_LEAST_SECONDS = 1e-5


@dataclass(frozen=True)
class CacheCalibration:
    """Fitted rates, seconds of a step by rows of a rank, and of a move both ways by bytes."""

    rates: CacheRates
    steps: dict[int, float]
    moves: dict[int, float]

    def text(self) -> str:
        rates = self.rates
        return (
            f"measured: {rates.step_seconds * 1e3:.3g} ms an iteration, "
            f"{rates.sample_seconds * 1e6:.3g} us a sample, and "
            f"{rates.byte_seconds * 1e9:.3g} s a GB of rows fetched and written back"
        )


def calibrate_cache(
    registry: RunConfig,
    plugins_dir: Path | None,
    spec: topologies.TopologySpec,
    path: Path,
    batch_size: int | None = None,
) -> tuple[topologies.TopologySpec, CacheCalibration]:
    """Train on the ranks of ``spec``, move rows, and write ``spec`` with the rates to ``path``."""
    registry, job = sessions.calibration_job(registry, plugins_dir, spec, path, batch_size)
    with torch.device("meta"):
        tables = model_tables.tables_of(build_model(registry, registry.dataset.schema()))
    dim = max(table.embedding_dim for table in tables)
    batch_size = registry.training.batch_size
    sizes = sorted({max(1, batch_size // part) for part in _PARTS})
    measured = launch(
        _measure, spec.ranks_per_node, job, sizes, dim, backend=backend_for(spec.device)
    )
    found = fit(
        {size: max(steps[size] for steps, _ in measured) for size in sizes},
        {size: max(moves[size] for _, moves in measured) for size in measured[0][1]},
    )
    spec = spec.with_section(SECTION, found.rates)
    sessions.write_topology(
        path, spec, f"Measured by recd plan {registry.path} --cache --calibrate {path}."
    )
    return spec, found


def fit(steps: dict[int, float], moves: dict[int, float]) -> CacheCalibration:
    """Fit lines through both."""
    step, sample = _line(steps)
    _, byte = _line(moves)
    rates = CacheRates(sample_seconds=sample, step_seconds=step, byte_seconds=byte)
    return CacheCalibration(rates, steps, moves)


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """Return the height at 0 and the slope, neither negative."""
    work = np.array([[1.0, size] for size in seconds])
    height, slope = step_costs.fit_costs(
        work, np.array(list(seconds.values())), least=_LEAST_SECONDS
    )
    return float(height), float(slope)


def _measure(
    rank: int, world_size: int, job: Job, sizes: Sequence[int], dim: int
) -> tuple[dict[int, float], dict[int, float]]:
    imports.silence_upstream()
    device = devices.device_of_rank(job.device)
    return _steps(rank, world_size, job, sizes, device), _moves(dim, device)


def _steps(
    rank: int, world_size: int, job: Job, sizes: Sequence[int], device: torch.device
) -> dict[int, float]:
    registry = job.load().with_training({"batch_size": max(sizes)})
    registry = replace(registry, cache=(), wrappers=())
    parts = assemble(registry, "plugins", device)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for size, step in sessions.steps_in_turns(
        parts, rank, world_size, device, sizes, rounds=_ROUNDS, lead=_LEAD, measured=_MEASURED
    ):
        start = _now(device)
        step()
        seconds[size].append(_now(device) - start)
    return {size: median(each) for size, each in seconds.items()}


def _moves(dim: int, device: torch.device) -> dict[int, float]:
    """Return median seconds to fetch rows to the device and write them back, by bytes."""
    on_device = device.type != "cpu"
    store = BackingStore(
        name="calibration",
        num_rows=_STORE_BYTES // (4 * dim),
        dim=dim,
        with_state=False,
    )
    mover = RowMover(store, pin=on_device)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for num_rows in _MOVED:
        seconds = []
        for _ in range(_MOVES):
            rows = torch.randperm(len(store.weights), generator=generator)[:num_rows]
            start = _now(device)
            weights = mover.read(rows).result()[0].to(device)
            back, _ = mover.buffers(num_rows)
            back.copy_(weights)
            mover.write(rows, back, None)
            mover.drain()
            seconds.append(_now(device) - start)
        found[num_rows * dim * 4] = median(seconds)
    mover.close()
    store.close()
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
