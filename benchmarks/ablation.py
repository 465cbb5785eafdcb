"""Training of rm1, rm2 and rm3 in the steps of the paper's ablation (section 6, figure 9).

All trainers of a model live in the same ranks at once, start from the same weights, and step in
turns; a speedup is the median over turns of the ratio within the turn. ``bound`` is what the
baseline's breakdown allows: its step over one whose lookups shrink by the ratio of ids, its
all-to-all by that of bytes, and sequence pooling by that of ids of sequences.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks._ablation_ranks import Job, Measured, Variant, measure
from benchmarks._measure import (
    Bars,
    Detail,
    Device,
    Figure,
    Findings,
    Size,
    check_device,
    higher,
    lower,
    max_abs_diff,
)
from recd_plugin_recd.models import rm_registry
from recd_plugins.config.from_file import load_registry
from recd_plugins.interfaces.step_cost import STAGES
from recd_plugins.runtime.launch import backend_for, launch

MODELS = ("rm1", "rm2", "rm3")
OPTIONS = [
    click.Option(["--only"], type=click.Choice(MODELS), help="One model."),
    click.Option(["--device"], type=click.Choice(["cpu", "cuda"]), default="cpu"),
]
#: Goal, and the paper's speedup at the same batch and with larger batches (figure 9).
_GOALS = {"rm1": (4.5, 1.89, 2.48), "rm2": (1.8, 1.25, 1.25), "rm3": (2.2, 1.43, 1.43)}
# Input dist, output dist and, of row-wise tables, their reduce-scatter and its gradient.
_ALL_TO_ALL = ("all_to_all", "reduce_scatter", "all_gather")

BASELINE = Variant("baseline", layout="stream", side="baseline")
CLUSTERED = Variant("+clustered table", side="baseline")
# Nothing is deduplicated: the gain of the sharders' CPU kernels alone.
PLUGIN_SHARDERS = Variant("plain, plugins' sharders", side="baseline", sharders="plugins")
DEDUP_EMB = Variant("+dedup EMB and jagged index select", pool_rows="all")
DEDUP = Variant("+dedup compute")
BATCH_2X, BATCH_3X = Variant("2x batch", batch=2), Variant("3x batch", batch=3)
DIM_2X = Variant("2x embedding dim", dim=2)
INDEX_DEDUP = Variant("TorchRec's index dedup", side="baseline", sharders="index_dedup")
COMPILED_CLUSTERED = replace(CLUSTERED, name="+clustered table, compiled", compiled=True)
COMPILED_DEDUP = replace(DEDUP, name="+dedup compute, compiled", compiled=True)
_VARIANTS = (
    *(BASELINE, CLUSTERED, PLUGIN_SHARDERS, DEDUP_EMB, DEDUP, BATCH_2X, BATCH_3X, DIM_2X),
    *(INDEX_DEDUP, COMPILED_CLUSTERED, COMPILED_DEDUP),
)
#: Trained on the same samples from the same weights.
_SAME_SAMPLES = (
    *(CLUSTERED, PLUGIN_SHARDERS, DEDUP_EMB, DEDUP, INDEX_DEDUP),
    *(COMPILED_CLUSTERED, COMPILED_DEDUP),
)
#: Stock trainers at the same batch.
_BASELINES = (BASELINE, CLUSTERED, INDEX_DEDUP, COMPILED_CLUSTERED)


@dataclass(frozen=True)
class _Run:
    """How much is measured: see ``Job``; ``sparse`` are the features read, or all."""

    scale: float
    batch_size: int
    batches: int
    turns: int
    steps: int
    profiled: int
    sparse: tuple[str, ...] = ()


_TINY = _Run(0.125, 64, 6, 2, 1, 1, sparse=("seq_0_0", "seq_0_1", "usr_0", "item_0"))
_RUNS: dict[tuple[Device, Size], _Run] = {
    ("cpu", "tiny"): _TINY,
    ("cpu", "small"): _Run(0.125, 256, batches=3, turns=3, steps=1, profiled=1),
    ("cpu", "reference"): _Run(0.125, 512, batches=6, turns=7, steps=1, profiled=3),
    ("cuda", "tiny"): _TINY,
    ("cuda", "small"): _Run(0.125, 1024, batches=6, turns=3, steps=4, profiled=2),
    ("cuda", "reference"): _Run(0.25, 2048, batches=6, turns=9, steps=8, profiled=3),
}


def run(size: Size, only: str | None = None, device: Device = "cpu") -> Findings:
    """Measure one model after the other."""
    check_device(device)
    run = _RUNS[device, size]
    # One rank a device, two at most.
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    models = [only] if only else MODELS[:1] if size == "tiny" else MODELS
    found = Findings(
        f"{', '.join(models)} at scale {run.scale:g}, {ranks} rank(s) on {device}, batch "
        f"{run.batch_size} each; {run.batches} batches a rank are made beforehand and go round, "
        f"freed memory is used again; {run.turns} turns of 1 step that warms up and {run.steps} "
        "timed",
        [],
    )
    for model in models:
        ablation = Ablation(model, _measure(model, run, size, device, ranks))
        found.add(ablation.findings())
    return found


def _measure(model: Any, run: _Run, size: Size, device: Device, ranks: int) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory() as folder:
        registries = {}
        for layout in ("stream", "clustered"):
            registries[layout] = Path(folder) / f"{layout}.yaml"
            text = rm_registry(
                model,
                folder=Path(folder),
                # Two batches at least of the largest ones.
                rows=max(run.batches, 6) * run.batch_size * ranks,
                scale=run.scale,
                layout=layout,
                batch_size=run.batch_size,
                ranks=ranks,
            )
            if run.sparse:
                sparse = f"    sparse: [{', '.join(run.sparse)}]\n"
                text = text.replace("    generate: ", f"{sparse}    generate: ", 1)
            registries[layout].write_text(text, encoding="utf-8")
            load_registry(registries[layout]).dataset.prepare()
        # Compiling takes too long for a small run.
        variants = tuple(v for v in _VARIANTS if size == "reference" or not v.compiled)
        job = Job(registries, variants, run.batches, run.turns, run.steps, run.profiled, device)
        return launch(measure, ranks, job, backend=backend_for(device))[0]


@dataclass(frozen=True)
class Ablation:
    """One model's trainers, by the name of the variant."""

    model: str
    measured: Mapping[str, Measured]

    def findings(self) -> Findings:
        """Return figures, tables and the chart of figure 9."""
        rows = [variant for variant in _VARIANTS if self._has(variant)]
        speedups = [statistics.median(self._speedups(variant)) for variant in rows]
        return Findings(
            "",
            self.figures(),
            [self._time_table(rows), self._work_table(rows)],
            self._notes(),
            [
                Bars(
                    self.model,
                    "samples a second over the baseline",
                    [v.name for v in rows],
                    {"": speedups},
                )
            ],
        )

    def figures(self) -> list[Figure]:
        """Return all figures of the model."""
        goal, paper, paper_in_all = _GOALS[self.model]
        before, after = self._of(BASELINE), self._of(DEDUP)
        gains: dict[str, list[float]] = {
            "speedup_dedup_alone": self._speedups(DEDUP, PLUGIN_SHARDERS),
            "speedup_clustered_table": self._speedups(CLUSTERED),
            "speedup_dedup_emb": self._speedups(DEDUP_EMB),
            "speedup_with_3x_batch": self._speedups(BATCH_3X),
            "speedup_over_best_baseline": self._speedups(DEDUP, self._best_baseline()),
        }
        if self._has(COMPILED_CLUSTERED):
            gains["compiled_speedup"] = self._speedups(COMPILED_DEDUP, COMPILED_CLUSTERED)
        if before.pooling:
            gains["bound"] = [self._bound(BASELINE)]
            gains["share_of_bound"] = self._shares_of_bound(BASELINE)
            gains["share_of_bound_equal_samples"] = self._shares_of_bound(CLUSTERED)
            gains["share_of_bound_dedup_alone"] = self._shares_of_bound(PLUGIN_SHARDERS)
        name, larger = self.model, self._speedups(self._larger())
        figures = [
            higher(f"{name}_speedup", self._speedups(DEDUP), goal=goal, paper=paper),
            higher(f"{name}_speedup_larger_batch", larger, paper=paper_in_all),
            *(higher(f"{name}_{what}", samples) for what, samples in gains.items()),
        ]
        figures += self._work()
        memory = {
            "memory_max": (self._memory(DEDUP), self._memory(BASELINE)),
            "memory_mean": (
                after.static_bytes + after.mean_bytes,
                before.static_bytes + before.mean_bytes,
            ),
            "activation_memory_max": (after.peak_bytes, before.peak_bytes),
            "memory_with_2x_dim": (self._memory(DIM_2X), self._memory(BASELINE)),
            "memory_with_3x_batch": (self._memory(BATCH_3X), self._memory(BASELINE)),
        }
        figures += [
            lower(f"{name}_{what}", ours / theirs) for what, (ours, theirs) in memory.items()
        ]
        return [
            *figures,
            lower(f"{name}_loss_max_abs_diff", self.loss_max_abs_diff(), "loss", goal=1e-5),
        ]

    def loss_max_abs_diff(self) -> float:
        """Return the largest difference of the losses of one step, of trainers on equal samples.

        In two rounds of the batches: trained on the same few again and again, a model amplifies
        rounding without end.
        """
        found = [self._of(variant) for variant in _SAME_SAMPLES if self._has(variant)]
        return max_abs_diff([each.losses[: 2 * each.num_batches] for each in found])

    def _work(self) -> list[Figure]:
        """Return ratios of work, counted on equal samples."""
        before, after = self._of(CLUSTERED), self._of(DEDUP)
        figures = [higher(f"{self.model}_ids_ratio", _total(before.ids) / _total(after.ids))]
        if _exchanged(before):
            fewer = _exchanged(before) / _exchanged(after)
            # 1 where every feature's bytes fall by its dedupe factor, of ids and of rows.
            over = fewer / (before.sent / after.sent)
            figures += [
                higher(f"{self.model}_bytes_ratio", fewer),
                higher(f"{self.model}_bytes_over_dedupe_factor", over, goal=0.98),
            ]
        return figures

    def _factors(self, stock: Variant) -> tuple[float, float, float]:
        """Return the ratios of ids, bytes and ids of sequences to those of the deduplicated one."""
        before, after = self._of(stock), self._of(DEDUP)
        ids = _total(before.ids) / _total(after.ids)
        sequences = _total(after.ids, "seq_")
        return (
            ids,
            # One rank sends nothing to others and copies what it would send.
            _exchanged(before) / _exchanged(after) if _exchanged(after) else ids,
            _total(before.ids, "seq_") / sequences if sequences else 1.0,
        )

    def _bound(self, stock: Variant) -> float:
        """Return the stock step's time over that of a step whose stages shrink by their factors."""
        stages, shares = self._of(stock).stages, self._of(stock).pooling
        assert stages is not None, "every variant that trains is profiled"
        ids, sent, pooling = self._factors(stock)
        gemm, other = (1 - shares[stage] * (1 - 1 / pooling) for stage in ("gemm", "other"))
        least = (
            stages.lookup / ids
            + stages.all_to_all / sent
            + stages.gemm * gemm
            + stages.all_reduce
            + stages.other * other
        )
        return stages.total / least

    def _shares_of_bound(self, stock: Variant) -> list[float]:
        return [speedup / self._bound(stock) for speedup in self._speedups(DEDUP, stock)]

    def _time_table(self, rows: list[Variant]) -> Detail:
        cells: list[list[str | float]] = []
        for variant in rows:
            found = self._of(variant)
            assert found.stages is not None, "every variant that trains is profiled"
            seconds = statistics.median(found.seconds)
            spent = found.stages.scaled(seconds).as_dict()
            cells.append(
                [
                    variant.name,
                    str(found.batch_size),
                    statistics.median(self._speedups(variant)),
                    1e3 * seconds,
                    *(1e3 * spent[stage] for stage in STAGES),
                ]
            )
        stages = [stage.replace("_", " ") for stage in STAGES]
        return Detail(f"{self.model}: time", ["", "batch", "speedup", "ms a step", *stages], cells)

    def _work_table(self, rows: list[Variant]) -> Detail:
        cells: list[list[str | float]] = []
        for variant in rows:
            found = self._of(variant)
            values = [
                *(self._memory(variant) / 1e6, (found.static_bytes + found.mean_bytes) / 1e6),
                *(found.peak_bytes / 1e6, _total(found.ids) / 1e3, _exchanged(found) / 1e6),
            ]
            cells.append([variant.name, *values])
        return Detail(
            f"{self.model}: memory of a rank, and work of a step of all ranks",
            ["", "memory max, MB", "mean, MB", "of it a step's, MB", "1000 ids", "MB exchanged"],
            cells,
        )

    def _notes(self) -> list[str]:
        failures = [
            f"{self.model}: {name} does not run here: {found.failure}"
            for name, found in self.measured.items()
            if found.failure is not None
        ]
        ids, sent, pooling = self._factors(BASELINE)
        return [
            *failures,
            f"{self.model}: dedupe factors {ids:.2f} (ids), {sent:.2f} (bytes), {pooling:.2f} (ids "
            "of sequences)",
        ]

    def _larger(self) -> Variant:
        """Return the deduplicating trainer with the largest batch within the baseline's memory."""
        fitting = [v for v in (BATCH_2X, BATCH_3X) if self._memory(v) <= self._memory(BASELINE)]
        return max(fitting, key=lambda variant: variant.batch, default=DEDUP)

    def _best_baseline(self) -> Variant:
        trained = (variant for variant in _BASELINES if self._has(variant))
        return min(trained, key=lambda variant: statistics.median(self._of(variant).seconds))

    def _has(self, variant: Variant) -> bool:
        found = self.measured.get(variant.name)
        return found is not None and found.failure is None

    def _of(self, variant: Variant) -> Measured:
        return self.measured[variant.name]

    def _memory(self, variant: Variant) -> float:
        found = self._of(variant)
        return found.static_bytes + found.peak_bytes

    def _speedups(self, variant: Variant, over: Variant = BASELINE) -> list[float]:
        """Return throughput over that of another trainer, by turn."""
        ours, theirs = self._of(variant), self._of(over)
        larger = ours.batch_size / theirs.batch_size
        pairs = zip(ours.seconds, theirs.seconds, strict=True)
        return [larger * before / after for after, before in pairs]


def _total(by_feature: Mapping[str, float], prefix: str = "") -> float:
    return sum(num for name, num in by_feature.items() if name.startswith(prefix))


def _exchanged(found: Measured) -> float:
    """Return bytes of the input and output dists of embeddings."""
    return sum(found.bytes_by_kind.get(kind, 0.0) for kind in _ALL_TO_ALL)
