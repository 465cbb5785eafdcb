"""SCARS: traffic of cached tables predicted and counted, a table larger than memory, theory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from recd_plugins.api import RecdError, SetupError
from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size

SUMMARY = "SCARS' cache of hot rows: traffic predicted and counted, a table larger than memory"
HELP = {
    "only": "One part: theory, traffic, file or registry.",
    "theory": "Only what the model reckons: no training, seconds.",
    "scale": "Rows, cache and batch are those of Criteo divided by N; 1 needs 16 GB.",
    "device": "Where the paper's tables train; the CPU measures traffic.",
}

Device = Literal["cpu", "cuda"]
PARTS = ("theory", "traffic", "file", "registry")


def workload(
    size: Size,
    *,
    only: str | None = None,
    theory: bool = False,
    scale: int | None = None,
    device: Device = "cpu",
) -> str:
    """The input in words."""
    parts = _parts(only, theory, device, scale)
    if device != "cpu":
        work = _device_workload(size, scale)
        batches = ", ".join(map(str, work.batch_sizes))
        return f"tables like Criteo's / {work.scale}, batches of {batches} / {work.scale}"
    from recd_plugin_scars.benchmarks.sizes import SIZES

    sizes, cells = SIZES[size], _cells(size, scale)
    words = {
        "theory": "distributions and histograms of reuse",
        "traffic": f"26 tables like Criteo's, rows, cache and batch / {cells.scale}",
        "file": "no table larger than memory"
        if sizes.file is None
        else f"a table of 4 x {sizes.file.memory / 2**20:.0f} MiB",
        "registry": f"{sizes.steps} steps on PAPERCAL",
    }
    return "; ".join(words[part] for part in parts)


def run(
    size: Size,
    *,
    only: str | None = None,
    theory: bool = False,
    scale: int | None = None,
    device: Device = "cpu",
) -> Findings:
    """All parts, or one of them; on CUDA the speeds of the paper's tables."""
    # Imported here: `recd bench` reads this module for its summary.
    parts = _parts(only, theory, device, scale)
    found = Findings([], [], [])
    if device != "cpu":
        from recd_plugin_scars.benchmarks.paper_tables import measure_on_device

        on_device = measure_on_device(_device_workload(size, scale), device)
        _add(found, on_device.figures(), on_device.details(), _device_notes())
        return found
    from recd_plugin_scars.benchmarks.sizes import SIZES

    if "theory" in parts:
        from recd_plugin_scars.benchmarks.theory import measure_theory

        reckoned = measure_theory()
        _add(found, reckoned.figures, reckoned.details, reckoned.notes)
    if "traffic" in parts:
        from recd_plugin_scars.benchmarks.cells import measure_cells

        threads = 1 if size == "tiny" else None  # on a busy machine a second one mostly waits
        cells = measure_cells(_cells(size, scale), threads=threads)
        _add(found, cells.figures(), cells.details(), cells.notes())
    if "file" in parts:
        _measure_file(found, size)
    if "registry" in parts:
        from recd_plugin_scars.benchmarks.by_registry import measure_by_registry

        with tempfile.TemporaryDirectory() as folder:
            pair = measure_by_registry(SIZES[size].steps, Path(folder))
        _add(found, pair.figures(), pair.details(), [])
    return found


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Traffic of distributions, and bytes of the backing store."""
    from recd_plugin_scars.benchmarks.plots import draw

    return draw(result, folder)


def _measure_file(found: Findings, size: Size) -> None:
    from recd_plugin_scars.benchmarks.file_store import measure_file_store
    from recd_plugin_scars.benchmarks.memory_limit import NoMemoryLimitError
    from recd_plugin_scars.benchmarks.sizes import SIZES

    work = SIZES[size].file
    if work is None:
        for figure in ("file_store_speedup", "file_store_loss_max_abs_diff"):
            found.notes.append(f"{figure} was not measured: its table takes gigabytes of disk")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = measure_file_store(work, Path(folder))
        except NoMemoryLimitError as error:
            found.notes.append(f"file_store_speedup was not measured: {error}")
            return
    _add(found, file.figures(), file.details(), file.notes())


def _cells(size: Size, scale: int | None) -> Any:
    from recd_plugin_scars.benchmarks.criteo import BATCH_SIZE
    from recd_plugin_scars.benchmarks.sizes import SIZES

    cells = SIZES[size].cells
    if scale is None:
        return cells
    if not 1 <= scale <= BATCH_SIZE:
        raise RecdError(
            f"--scale {scale}: give 1 for tables as large as Criteo's, or up to {BATCH_SIZE}"
        )
    return replace(cells, scale=scale, other_scale=max(scale, cells.other_scale))


def _device_workload(size: Size, scale: int | None) -> Any:
    from recd_plugin_scars.benchmarks.paper_tables import DeviceWorkload

    return DeviceWorkload(scale=_cells(size, scale).scale)


def _device_notes() -> list[str]:
    import torch

    return [f"device: {torch.cuda.get_device_name()}"]


def _add(
    found: Findings, figures: Sequence[Figure], details: Sequence[Detail], notes: Sequence[str]
) -> None:
    found.figures.extend(figures)
    found.details.extend(details)
    found.notes.extend(notes)


def _parts(only: str | None, theory: bool, device: str, scale: int | None) -> tuple[str, ...]:
    parts = _asked(only, theory, device)
    if scale is not None and {"traffic", "device"}.isdisjoint(parts):
        raise RecdError(f"--scale {scale} is of the part traffic, not of {parts[0]}: leave it out")
    return parts


def _asked(only: str | None, theory: bool, device: str) -> tuple[str, ...]:
    if device != "cpu":
        _check_device(device)
        if only is not None or theory:
            raise RecdError(
                f"--device {device} measures speed on the device alone: leave --only and --theory "
                "out"
            )
        return ("device",)
    if theory and only not in (None, "theory"):
        raise RecdError(f"--theory and --only {only} are two parts: leave one out")
    if theory:
        return ("theory",)
    if only is None:
        return PARTS
    if only not in PARTS:
        raise RecdError(f"--only {only}: the parts are {', '.join(PARTS)}")
    return (only,)


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "--device cuda: torch sees no CUDA device here, so that the paper's tables cannot be "
            "measured; leave --device out for what the CPU can show"
        )
