"""Ablation of RecD on the models rm1, rm2 and rm3 (section 6 and figure 9 of the RecD paper).

All variants of a model start from the same weights and train in the same ranks, in alternating
turns. A speedup is the median over turns of the ratio within a turn. Figure ``bound`` is an upper
limit of the speedup, from the baseline's time per stage and the deduplicated ids and bytes.
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
    DEVICE,
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
    click.Option(["--only"], type=click.Choice(MODELS), help="Measure only this model."),
    DEVICE,
]
#: Goal, the paper's speedup at the same batch size, and with larger batches (figure 9).
_GOALS = {"rm1": (4.5, 1.89, 2.48), "rm2": (1.8, 1.25, 1.25), "rm3": (2.2, 1.43, 1.43)}
# Collectives of the input dist and the output dist; row-wise tables use the last two.
_ALL_TO_ALL = ("all_to_all", "reduce_scatter", "all_gather")

BASELINE = Variant("baseline", layout="stream", side="baseline")
CLUSTERED = Variant("+clustered table", side="baseline")
# Without deduplication, to measure the gain of the sharders' CPU kernels.
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
#: Variants that train on the same samples from the same weights.
_SAME_SAMPLES = (
    *(CLUSTERED, PLUGIN_SHARDERS, DEDUP_EMB, DEDUP, INDEX_DEDUP),
    *(COMPILED_CLUSTERED, COMPILED_DEDUP),
)
#: Stock variants with the same batch size.
_BASELINES = (BASELINE, CLUSTERED, INDEX_DEDUP, COMPILED_CLUSTERED)


@dataclass(frozen=True)
class _Run:
    """Size of a run, with fields like ``Job``; ``sparse`` lists features to read, () for all."""

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
    check_device(device)
    run = _RUNS[device, size]
    # One rank per device, at most two.
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    models = [only] if only else MODELS[:1] if size == "tiny" else MODELS
    found = Findings(
        f"{', '.join(models)} at scale {run.scale:g}, {ranks} rank(s) on {device}, batch "
        f"{run.batch_size} each; {run.batches} batches per rank, created in advance and repeated; "
        f"freed memory is reused; {run.turns} turns of 1 warm-up step and {run.steps} timed steps",
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
                # At least two of the largest batches.
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
        # Skip compiled variants in small runs, because compiling is slow.
        variants = tuple(v for v in _VARIANTS if size == "reference" or not v.compiled)
        job = Job(registries, variants, run.batches, run.turns, run.steps, run.profiled, device)
        return launch(measure, ranks, job, backend=backend_for(device))[0]


@dataclass(frozen=True)
class Ablation:
    """Results of one model, keyed by variant name."""

    model: str
    measured: Mapping[str, Measured]

    def findings(self) -> Findings:
        """Return the figures and tables of the model."""
        return Findings("", self.figures(), [self._time_table()], self._notes())

    def figures(self) -> list[Figure]:
        goal, paper, paper_in_all = _GOALS[self.model]
        before, after = self._of(BASELINE), self._of(DEDUP)
        trained = filter(self._has, _BASELINES)
        best_baseline = min(trained, key=lambda each: statistics.median(self._of(each).seconds))
        gains: dict[str, list[float]] = {
            "speedup_dedup_alone": self._speedups(DEDUP, PLUGIN_SHARDERS),
            "speedup_clustered_table": self._speedups(CLUSTERED),
            "speedup_dedup_emb": self._speedups(DEDUP_EMB),
            "speedup_with_3x_batch": self._speedups(BATCH_3X),
            "speedup_over_best_baseline": self._speedups(DEDUP, best_baseline),
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
        """Return the largest loss difference between variants that train on the same samples.

        Compares only the first two passes over the batches; rounding errors grow afterwards.
        """
        found = [self._of(variant) for variant in _SAME_SAMPLES if self._has(variant)]
        return max_abs_diff([each.losses[: 2 * each.num_batches] for each in found])

    def _work(self) -> list[Figure]:
        """Return how much deduplication reduces ids and bytes on the same samples, as figures."""
        before, after = self._of(CLUSTERED), self._of(DEDUP)
        ids, fewer, _ = self._factors(CLUSTERED)
        figures = [higher(f"{self.model}_ids_ratio", ids)]
        if _exchanged(before):
            # 1 if the bytes of every feature shrink by its deduplication factor.
            over = fewer / (before.sent / after.sent)
            figures += [
                higher(f"{self.model}_bytes_ratio", fewer),
                higher(f"{self.model}_bytes_over_dedupe_factor", over, goal=0.98),
            ]
        return figures

    def _factors(self, stock: Variant) -> tuple[float, float, float]:
        """Return the deduplication factors of a stock variant: all ids, bytes, and sequence ids."""
        before, after = self._of(stock), self._of(DEDUP)
        ids = _total(before.ids) / _total(after.ids)
        sequences = _total(after.ids, "seq_")
        return (
            ids,
            # A single rank sends nothing, but copies the same data.
            _exchanged(before) / _exchanged(after) if _exchanged(after) else ids,
            _total(before.ids, "seq_") / sequences if sequences else 1.0,
        )

    def _bound(self, stock: Variant) -> float:
        """Return the highest speedup over a stock variant that deduplication allows.

        Divides the time of each stage of a step by the deduplication factor of the stage.
        """
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

    def _time_table(self) -> Detail:
        cells: list[list[str | float]] = []
        for variant in filter(self._has, _VARIANTS):
            found = self._of(variant)
            assert found.stages is not None, "every variant that trains is profiled"
            seconds = statistics.median(found.seconds)
            spent = found.stages.scaled(seconds).as_dict()
            times = [1e3 * each for each in (seconds, *(spent[stage] for stage in STAGES))]
            speedup, memory = statistics.median(self._speedups(variant)), self._memory(variant)
            cells.append([variant.name, str(found.batch_size), speedup, *times, memory / 1e6])
        stages = [stage.replace("_", " ") for stage in STAGES]
        headings = ["", "batch", "speedup", "ms per step", *stages, "max memory, MB"]
        return Detail(self.model, headings, cells)

    def _notes(self) -> list[str]:
        failures = [
            f"{self.model}: {name} was not measured: {found.failure}"
            for name, found in self.measured.items()
            if found.failure is not None
        ]
        ids, sent, pooling = self._factors(BASELINE)
        return [
            *failures,
            f"{self.model}: deduplication factors {ids:.2f} (ids), {sent:.2f} (bytes), "
            f"{pooling:.2f} (sequence ids)",
        ]

    def _larger(self) -> Variant:
        """Return the deduplicated variant with the largest batch within the baseline's memory."""
        fitting = [v for v in (BATCH_2X, BATCH_3X) if self._memory(v) <= self._memory(BASELINE)]
        return max(fitting, key=lambda variant: variant.batch, default=DEDUP)

    def _has(self, variant: Variant) -> bool:
        found = self.measured.get(variant.name)
        return found is not None and found.failure is None

    def _of(self, variant: Variant) -> Measured:
        return self.measured[variant.name]

    def _memory(self, variant: Variant) -> float:
        found = self._of(variant)
        return found.static_bytes + found.peak_bytes

    def _speedups(self, variant: Variant, over: Variant = BASELINE) -> list[float]:
        """Return the throughput of a variant divided by that of another, one value per turn."""
        ours, theirs = self._of(variant), self._of(over)
        larger = ours.batch_size / theirs.batch_size
        pairs = zip(ours.seconds, theirs.seconds, strict=True)
        return [larger * before / after for after, before in pairs]


def _total(by_feature: Mapping[str, float], prefix: str = "") -> float:
    return sum(num for name, num in by_feature.items() if name.startswith(prefix))


def _exchanged(found: Measured) -> float:
    """Return the bytes of embedding input dists and output dists."""
    return sum(found.bytes_by_kind.get(kind, 0.0) for kind in _ALL_TO_ALL)
