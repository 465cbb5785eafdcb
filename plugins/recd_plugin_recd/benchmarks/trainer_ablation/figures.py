"""Figures and tables, made of what was measured of one model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from recd_plugin_recd.benchmarks.trainer_ablation.bound import DedupeFactors, speedup_bound
from recd_plugin_recd.benchmarks.trainer_ablation.ranks import Measured
from recd_plugin_recd.benchmarks.trainer_ablation.variants import (
    BASELINE,
    BASELINES,
    BATCH_2X,
    BATCH_3X,
    CLUSTERED,
    COMPILED_CLUSTERED,
    COMPILED_DEDUP,
    DEDUP,
    DEDUP_EMB,
    DIM_2X,
    INDEX_DEDUP,
    PLUGIN_SHARDERS,
    SAME_SAMPLES,
    Variant,
    largest_batch,
)
from recd_plugins.api.planning import STAGES
from recd_plugins.testing.benchmark import Detail, Figure, largest

#: Goal, and the paper's speedup at the same batch and with larger batches (figure 9).
GOALS: Mapping[str, tuple[float, float, float]] = {
    "rm1": (4.5, 1.89, 2.48),
    "rm2": (1.8, 1.25, 1.25),
    "rm3": (2.2, 1.43, 1.43),
}
_SHARE_GOAL = 0.85
# Input dist, output dist and, of row-wise tables, their reduce-scatter and its gradient.
_ALL_TO_ALL = ("all_to_all", "reduce_scatter", "all_gather")
_SEQUENCES = "seq_"


@dataclass(frozen=True)
class Ablation:
    """One model's trainers.

    Attributes:
        model: rm1, rm2 or rm3.
        measured: by the name of the variant.
    """

    model: str
    measured: Mapping[str, Measured]

    @cached_property
    def larger(self) -> Variant:
        """The deduplicating trainer with the largest batch within the baseline's memory."""
        by_multiple = {v.batch: v for v in (DEDUP, BATCH_2X, BATCH_3X) if self._has(v)}
        memory = {multiple: self._memory(v) for multiple, v in by_multiple.items()}
        return by_multiple[largest_batch(memory, self._memory(BASELINE))]

    def factors(self, stock: Variant = BASELINE) -> DedupeFactors:
        """The factors of the work of a stock trainer over that of the deduplicated one."""
        before, after = self._of(stock), self._of(DEDUP)
        ids = _ratio(_total(before.ids), _total(after.ids))
        return DedupeFactors(
            ids=ids,
            # One rank sends nothing to others and copies what it would send.
            bytes=_ratio(_exchanged(before), _exchanged(after), otherwise=ids),
            pooling=_ratio(_total(before.ids, _SEQUENCES), _total(after.ids, _SEQUENCES)),
        )

    def bound(self, stock: Variant = BASELINE) -> float:
        """What the measured breakdown of a stock trainer allows."""
        before = self._of(stock)
        assert before.stages is not None, "every variant that trains is profiled"
        return speedup_bound(before.stages, before.pooling, self.factors(stock))

    def figures(self) -> list[Figure]:
        """All figures of the model."""
        goal, paper, paper_in_all = GOALS.get(self.model, (None, None, None))
        return [
            self._figure("speedup", self._speedups(DEDUP), goal=goal, paper=paper),
            self._figure("bound", [self.bound()]),
            self._figure("share_of_bound", self._shares_of_bound(BASELINE), goal=_SHARE_GOAL),
            self._figure("bound_equal_samples", [self.bound(CLUSTERED)]),
            self._figure("share_of_bound_equal_samples", self._shares_of_bound(CLUSTERED)),
            self._figure("speedup_plugin_sharders", self._speedups(PLUGIN_SHARDERS, CLUSTERED)),
            self._figure("speedup_dedup_alone", self._speedups(DEDUP, PLUGIN_SHARDERS)),
            self._figure("bound_dedup_alone", [self.bound(PLUGIN_SHARDERS)]),
            self._figure("share_of_bound_dedup_alone", self._shares_of_bound(PLUGIN_SHARDERS)),
            self._figure("speedup_clustered_table", self._speedups(CLUSTERED)),
            self._figure("speedup_dedup_emb", self._speedups(DEDUP_EMB)),
            self._figure("speedup_larger_batch", self._speedups(self.larger), paper=paper_in_all),
            *self._against_strong_baselines(),
            *self._work(),
            *self._memory_figures(),
            *self._stage_shares(),
            self._figure(
                "loss_max_abs_diff", [self.loss_max_abs_diff], unit="loss", better="lower",
                goal=1e-5,
            ),
        ]  # fmt: skip

    @property
    def loss_max_abs_diff(self) -> float:
        """The largest difference of the losses of one step, of trainers on equal samples.

        In two rounds of the batches: trained on the same few again and again, a model amplifies
        rounding without end.
        """
        found = [self._of(variant) for variant in SAME_SAMPLES if self._has(variant)]
        curves = [each.losses[: 2 * each.num_batches] for each in found]
        steps = zip(*curves, strict=True)
        return largest(largest(losses) - min(losses) for losses in steps)

    def time_table(self) -> Detail:
        """Figures 8 and 9 in numbers."""
        headings = ["", "batch", "speedup", "ms a step"]
        rows: list[list[str | float]] = []
        for variant, found in self._rows():
            assert found.stages is not None, "every variant that trains is profiled"
            spent = found.stages.scaled(statistics.median(found.seconds)).as_dict()
            milliseconds = [1e3 * spent[stage] for stage in STAGES]
            rows.append(
                [
                    self._named(variant),
                    str(found.batch_size),
                    statistics.median(self._speedups(variant)),
                    1e3 * statistics.median(found.seconds),
                    *milliseconds,
                ]
            )
        return Detail(
            f"{self.model}: time", [*headings, *(s.replace("_", " ") for s in STAGES)], rows
        )

    def work_table(self) -> Detail:
        """Table 2 in numbers, and counted work."""
        rows: list[list[str | float]] = [
            [
                self._named(variant),
                str(found.batch_size),
                (found.static_bytes + found.peak_bytes) / 1e6,
                (found.static_bytes + found.mean_bytes) / 1e6,
                found.peak_bytes / 1e6,
                _total(found.ids) / 1e3,
                _exchanged(found) / 1e6,
            ]
            for variant, found in self._rows()
        ]
        headings = ["", "batch", "memory max, MB", "mean, MB", "of it a step's, MB"]
        return Detail(
            f"{self.model}: memory of a rank, and work of a step of all ranks",
            [*headings, "1000 ids", "MB exchanged"],
            rows,
        )

    def notes(self) -> list[str]:
        """What could not be trained, and what the bound is made of."""
        failures = [
            f"{self.model}: {name} does not run here: {found.failure}"
            for name, found in self.measured.items()
            if found.failure is not None
        ]
        factors, pooling = self.factors(), self._of(BASELINE).pooling
        return [
            *failures,
            f"{self.model}: bound {self.bound():.2f} from dedupe factors {factors.ids:.2f} (ids), "
            f"{factors.bytes:.2f} (bytes) and {factors.pooling:.2f} (ids of sequences); sequence "
            f"pooling is {pooling['gemm']:.0%} of gemm and {pooling['other']:.0%} of other work in "
            "the baseline",
        ]

    def _shares_of_bound(self, stock: Variant) -> list[float]:
        return [speedup / self.bound(stock) for speedup in self._speedups(DEDUP, stock)]

    def _against_strong_baselines(self) -> Iterator[Figure]:
        best = min(
            (variant for variant in BASELINES if self._has(variant)),
            key=lambda variant: statistics.median(self._of(variant).seconds),
        )
        yield self._figure("speedup_over_best_baseline", self._speedups(DEDUP, best))
        if self._has(INDEX_DEDUP):
            yield self._figure("speedup_over_index_dedup", self._speedups(DEDUP, INDEX_DEDUP))
        if self._has(COMPILED_CLUSTERED):
            compiled = self._speedups(COMPILED_DEDUP, COMPILED_CLUSTERED)
            yield self._figure("compiled_speedup", compiled)

    def _work(self) -> Iterator[Figure]:
        """Counted on equal samples."""
        before, after = self._of(CLUSTERED), self._of(DEDUP)
        yield self._figure("ids_ratio", [_ratio(_total(before.ids), _total(after.ids))])
        if not _exchanged(before):
            return
        fewer = _exchanged(before) / _exchanged(after)
        yield self._figure("bytes_ratio", [fewer])
        # 1 where every feature's bytes fall by its dedupe factor, of ids and of rows.
        expected = _ratio(before.sent, after.sent)
        yield self._figure("bytes_over_dedupe_factor", [fewer / expected], goal=0.98)

    def _memory_figures(self) -> Iterator[Figure]:
        before, after = self._of(BASELINE), self._of(DEDUP)
        for name, ours, theirs in (
            ("memory_max", self._memory(DEDUP), self._memory(BASELINE)),
            (
                "memory_mean",
                after.static_bytes + after.mean_bytes,
                before.static_bytes + before.mean_bytes,
            ),
            ("activation_memory_max", after.peak_bytes, before.peak_bytes),
            ("activation_memory_mean", after.mean_bytes, before.mean_bytes),
            ("memory_with_2x_dim", self._memory(DIM_2X), self._memory(BASELINE)),
            ("memory_with_3x_batch", self._memory(BATCH_3X), self._memory(BASELINE)),
        ):
            yield self._lower(name, ours / theirs)
        yield self._figure("speedup_with_2x_dim", self._speedups(DIM_2X))
        yield self._figure("speedup_with_3x_batch", self._speedups(BATCH_3X))

    def _stage_shares(self) -> Iterator[Figure]:
        """Of the stock path; as in the paper, the all-reduce is among the others."""
        for variant, suffix in ((BASELINE, ""), (DEDUP, "_after")):
            stages = self._of(variant).stages
            assert stages is not None, "every variant that trains is profiled"
            shares = {
                "lookup": stages.lookup,
                "gemm": stages.gemm,
                "all_to_all": stages.all_to_all,
                "other": stages.all_reduce + stages.other,
            }
            for name, seconds in shares.items():
                yield self._lower(f"{name}_share{suffix}", seconds / stages.total, unit="share")

    def _rows(self) -> Iterator[tuple[Variant, Measured]]:
        """The variants that train, in the order in which they were measured."""
        known = {v.name: v for v in (*BASELINES, *SAME_SAMPLES, BATCH_2X, BATCH_3X, DIM_2X)}
        for name, found in self.measured.items():
            if found.failure is None:
                yield known[name], found

    def _named(self, variant: Variant) -> str:
        if variant == self.larger and variant != DEDUP:
            return f"+larger batch ({variant.batch}x)"
        return variant.name

    def _has(self, variant: Variant) -> bool:
        found = self.measured.get(variant.name)
        return found is not None and found.failure is None

    def _of(self, variant: Variant) -> Measured:
        return self.measured[variant.name]

    def _memory(self, variant: Variant) -> float:
        found = self._of(variant)
        return found.static_bytes + found.peak_bytes

    def _speedups(self, variant: Variant, over: Variant = BASELINE) -> list[float]:
        """Throughput over that of another trainer, by turn."""
        ours, theirs = self._of(variant), self._of(over)
        larger = ours.batch_size / theirs.batch_size
        pairs = zip(ours.seconds, theirs.seconds, strict=True)
        return [larger * before / after for after, before in pairs]

    def _figure(
        self,
        name: str,
        samples: list[float],
        *,
        unit: str = "ratio",
        better: Literal["higher", "lower"] = "higher",
        paper: float | None = None,
        goal: float | None = None,
    ) -> Figure:
        return Figure.of(
            f"{self.model}_{name}", samples, unit=unit, better=better, paper=paper, goal=goal
        )

    def _lower(self, name: str, value: float, unit: str = "ratio") -> Figure:
        return self._figure(name, [value], unit=unit, better="lower")


def _total(by_feature: Mapping[str, float], prefix: str = "") -> float:
    return sum(num for name, num in by_feature.items() if name.startswith(prefix))


def _exchanged(found: Measured) -> float:
    """Bytes that the input and output dists of embeddings send."""
    return sum(found.bytes_by_kind.get(kind, 0.0) for kind in _ALL_TO_ALL)


def _ratio(before: float, after: float, otherwise: float = 1.0) -> float:
    return before / after if after else otherwise
