"""Results of runs: figures, data stalls, comparisons, output tables and advice.

A figure is one reported number, such as the step time or the test AUC.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from recd_plugins.data.stalls import STALL_TARGET, Pace, Stalls
from recd_plugins.interfaces import Section
from recd_plugins.interfaces.batch import STALL_CAUSES
from recd_plugins.interfaces.callback import Quality
from recd_plugins.interfaces.step_cost import StageTimes
from recd_plugins.report.tables import text_table
from recd_plugins.runtime.text import bytes_text, metric_words

if TYPE_CHECKING:
    from recd_plugins.training.evaluation import Validation

#: Minimum number of timed steps for advice on speed.
FEW_STEPS = 5
# Loss differences up to this value are rounding errors of one step.
_ROUNDING = 1e-6
# Larger loss differences indicate an ill-conditioned run or a different computation.
_GROWN = 1e-3
# Waiting for data is reported without --verbose if it exceeds this share of a step.
_MUCH_WAITING = 0.2
# A higher test AUC usually means that a feature leaks the label.
_BEST_AUC = 0.99
_SPLITS = ("test", "validation", "train")
_OF_SPLIT = ("test_", "validation_", "train_")
_TITLES = {
    "step_seconds": "step time (median)",
    "lookup_seconds": "  lookup",
    "gemm_seconds": "  GEMM",
    "all_to_all_seconds": "  all-to-all",
    "all_reduce_seconds": "  all-reduce",
    "other_seconds": "  other",
    "collective_bytes": "bytes sent a step, all collectives",
    "ids_looked_up": "ids looked up a step (first steps)",
    "peak_memory_bytes": "peak memory of a rank",
    "last_loss": "loss at the last step",
}

S = TypeVar("S", bound=str)
T = TypeVar("T")


# Waiting for data.


@dataclass(frozen=True)
class StallReport:
    """Data stalls (time spent waiting for batches) of a run, one entry per rank."""

    ranks: tuple[Stalls, ...]

    @classmethod
    def of(cls, ranks: Sequence[Stalls | None]) -> StallReport | None:
        """Return the report for the stalls of all ranks, or None if the run was too short."""
        known = tuple(rank for rank in ranks if rank is not None)
        return cls(known) if len(known) == len(ranks) else None

    @property
    def worst_rank(self) -> int:
        """Return the rank that waits longest for data. Other ranks wait for it in collectives."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].share)

    @property
    def worst(self) -> Stalls:
        """Return the data stalls of ``worst_rank``."""
        return self.ranks[self.worst_rank]

    def mean_shares(self) -> dict[str, float]:
        """Return a dict from cause of waiting to its mean share of the step time over ranks."""
        shares = [rank.shares() for rank in self.ranks]
        return {cause: sum(each[cause] for each in shares) / len(shares) for cause in STALL_CAUSES}

    @property
    def readers(self) -> int | None:
        """Return how many reader processes avoid stalls of the worst rank; None if none do."""
        worst = self.worst
        pace = Pace(worst.making.reader, worst.training_seconds, worst.making.arrival)
        return pace.readers_for(STALL_TARGET)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values: shares of the step time, and seconds per rank."""
        worst = self.worst
        return {
            "share": sum(self.mean_shares().values()),
            "shares": self.mean_shares(),
            "worst": {"rank": self.worst_rank, "share": worst.share, "shares": worst.shares()},
            "steps": worst.steps,
            "readers_needed": self.readers,
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def advice(self) -> str:
        """Return advice on data stalls; "" if they are small or the run was short."""
        worst, readers = self.worst, self.readers
        if worst.share <= _MUCH_WAITING or worst.steps < FEW_STEPS:
            return ""
        cause = max(worst.seconds, key=lambda name: worst.seconds[name])
        waits = f"The trainer waits {worst.share:.0%} of a step for data, mostly for {cause}. "
        if readers is None:
            return waits + "More readers do not help; use larger batches or fewer features"
        return waits + (
            f"Set training.workers: {readers} (needs {readers} free "
            f"core{'' if readers == 1 else 's'} per rank)"
        )


def stall_table(reports: Mapping[str, StallReport]) -> Table:
    """Return a table with the share of step time spent waiting for data, one column per run."""
    columns: dict[str, Mapping[str, float]] = {}
    for name, report in reports.items():
        columns[f"{name} mean".strip()] = report.mean_shares()
        columns[f"{name} worst rank".strip()] = report.worst.shares()
    steps = ", ".join(str(report.worst.steps) for report in reports.values())
    title, caption = "waiting for data, share of a step", f"of {steps} steps"
    table = text_table(title, [""], [*columns], caption=caption)
    for cause in STALL_CAUSES:
        table.add_row(cause, *(f"{shares[cause]:.1%}" for shares in columns.values()))
    table.add_row("all", *(f"{sum(shares.values()):.1%}" for shares in columns.values()))
    return table


# A run.


@dataclass(frozen=True)
class Result:
    """Results of a run, the same on every rank. Values are None if the run was too short.

    Attributes:
        step_seconds: median wall time of a step, including reading.
        collective_bytes: bytes that all ranks send in one step, per kind of collective.
        ids_looked_up: mean number of ids looked up per step in steps 2 to 5, over all ranks.
        peak_memory_bytes: peak memory in training, on the rank with the highest peak.
        losses: mean loss over ranks of each step since step 0; NaN for steps that were not
            recorded.
        train: quality of the predictions for training rows, each made before training on the row.
        test: quality on the test split; of the best step if the run was validated.
        stages: seconds of a step per stage, averaged over ranks; None unless profiled.
        sections: dict from name to report section of table plugins.
        ingestion: figures of the ingestion plugin per rank, for the training split.
        progressive: last step and metrics of each window of ``training.progressive_validation``.
        first_step: step of the checkpoint that the run resumed from; 0 for a new run.
    """

    samples_per_second: float | None
    step_seconds: float | None
    collective_bytes: dict[str, float]
    ids_looked_up: float | None
    peak_memory_bytes: int
    losses: list[float]
    train: Quality | None
    test: Quality | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stages: StageTimes | None = None
    sections: Mapping[str, Section] = field(default_factory=dict)
    stalls: StallReport | None = None
    ingestion: list[Mapping[str, float]] | None = None
    validation: Validation | None = None
    progressive: list[dict[str, Any]] | None = None
    first_step: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, with each section under its name and metrics within ``test``."""
        reports = {**self.sections, "stalls": self.stalls, "validation": self.validation}
        shown = {name: report and report.as_json() for name, report in reports.items()}
        values = asdict(replace(self, sections={}))
        del values["sections"], values["metrics"]
        if self.progressive is None:
            del values["progressive"]
        values["calibration_bins"] = None if self.test is None else _bins(self.test)
        for name in ("train", "test"):
            quality: Quality | None = getattr(self, name)
            values[name] = quality and quality.figures()
        if self.test is not None:
            values["test"] |= self.metrics
        return {**values, **shown}

    def tables(self, *, verbose: bool = False) -> list[Table]:
        """Return tables of metrics and speed. ``verbose`` also lists byte counts of 0."""
        found = figures(self)
        splits = [name for name in _SPLITS if any(n.startswith(f"{name}_") for n in found)]
        metrics = {n: n.split("_", 1)[1] for n in found if n.startswith(_OF_SPLIT)}
        resumed = f"train after step {self.first_step}" if self.first_step else "train"
        quality = text_table("", [""], [resumed if s == "train" else s for s in splits])
        rows = sorted(dict.fromkeys(metrics.values()), key=lambda n: n.endswith(".num_samples"))
        for metric in rows:
            cells = (found.get(f"{split}_{metric}", (None, "")) for split in splits)
            quality.add_row(figure_words(metric), *(figure_text(*cell) for cell in cells))
        last = len(self.losses)
        which = f"steps {self.first_step + 1} to {last}" if self.first_step else f"{last} steps"
        speed = text_table(f"training, {which}", [""], [""])
        speed.show_header = False
        for name, (value, unit) in found.items():
            if name not in metrics and (verbose or value or unit != "B"):
                speed.add_row(figure_words(name), figure_text(value, unit))
        return [quality, speed] if splits else [speed]


def _bins(quality: Quality) -> Any:
    """Return the calibration bins, or with several tasks a dict from task to its bins."""
    if not quality.tasks:
        return quality.bins
    return {name: each.bins for name, each in quality.tasks.items() if isinstance(each, Quality)}


def figures(result: Result) -> dict[str, tuple[float | None, str]]:
    """Return (value, unit) by metric name, such as ``step_seconds``."""
    return figures_of(result.as_json())


def figures_of(values: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """Return (value, unit) by metric name, from the output of ``Result.as_json``."""
    found: dict[str, tuple[float | None, str]] = {}
    validated = (values.get("validation") or {}).get("figures")
    for split, given in zip(_SPLITS, (values["test"], validated, values["train"]), strict=True):
        quality = dict(given or {})
        if "num_samples" in quality:
            found[f"{split}_samples"] = (quality.pop("num_samples"), "")
        for name, value in quality.items():
            unit = "" if name.endswith(".num_samples") else "loss"
            found[f"{split}_{name}"] = (value, unit)
    found["samples_per_second"] = (values["samples_per_second"], "samples/s")
    found["step_seconds"] = (values["step_seconds"], "s")
    for stage, seconds in (values["stages"] or {}).items():
        found[f"{stage}_seconds"] = (seconds, "s")
    sent = values["collective_bytes"]
    for kind, num_bytes in sent.items():
        found[f"{kind}_bytes"] = (num_bytes, "B")
    found["collective_bytes"] = (sum(sent.values()) if sent else None, "B")
    found["ids_looked_up"] = (values["ids_looked_up"], "")
    found["peak_memory_bytes"] = (values["peak_memory_bytes"], "B")
    found["last_loss"] = (values["losses"][-1] if values["losses"] else None, "loss")
    return found


def figure_words(name: str) -> str:
    """Return the name of a figure, such as the step time, as shown in tables."""
    if name in _TITLES:
        return _TITLES[name]
    if name.endswith("_bytes"):
        return f"  {name.removesuffix('_bytes')}"
    return metric_words(name)


def figure_text(value: float | None, unit: str) -> str:
    """Format the value of a figure, such as the step time, for tables."""
    if value is None or math.isnan(value):
        return "-"
    if unit == "B":
        return bytes_text(value)
    if unit == "loss":
        return f"{value:.5f}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:,.0f}"


def quality_advice(values: Mapping[str, Any], whose: str = "") -> list[str]:
    """Return advice on the test metrics in the output of ``Result.as_json``.

    ``whose`` is the run's name in the text; "" if there is only one run.
    """
    test = values["test"]
    if test is None:
        return []
    advice = entropy_advice(test, "test", whose, values["train"] or {})
    for name, value in test.items():
        task, _, metric = name.rpartition(".")
        if metric == "auc" and (value or 0.0) > _BEST_AUC:
            of = f" of {_whose(task, whose)}" if task or whose else ""
            advice.append(
                f"The test AUC{of}, {value:.4f}, is suspiciously high. Check for features that "
                "leak the label, and for test rows in the training data"
            )
    return advice


def entropy_advice(
    quality: Mapping[str, Any], split: str, whose: str = "", train: Mapping[str, Any] | None = None
) -> list[str]:
    """Return ``worse_than_base_rate`` for each label in the figures of a split."""
    told = []
    for name, entropy in quality.items():
        task, _, metric = name.rpartition(".")
        if metric == "normalized_entropy" and entropy is not None:
            of = _whose(task, whose)
            told.append(worse_than_base_rate(entropy, split, of, (train or {}).get(name)))
    return [each for each in told if each]


def _whose(task: str, run: str) -> str:
    return f"{task} of {run}" if task and run else task or run


def worse_than_base_rate(
    entropy: float, split: str, whose: str = "", train: float | None = None
) -> str:
    """Return advice if predictions are worse than the base rate or all labels are equal, else "".

    ``train`` is the normalized entropy of the training rows, if known.
    """
    if entropy <= 1:
        return ""
    whose = f" of {whose}" if whose else ""
    if math.isnan(entropy):
        return (
            f"All labels of the {split} split{whose} are equal, so normalized entropy and AUC are "
            "undefined. If the data has only positives, use a ranking metric instead"
        )
    advice = "Train longer, or change training.learning_rate"
    if train is None:
        advice = "If recd run shows a value below 1 for the training rows, the model overfits"
    elif train < 1:
        advice = "The model overfits: use more data, fewer epochs or a smaller embedding_dim"
    return (
        f"The normalized entropy{whose} on the {split} split is {entropy:.5f}. A value above 1 is "
        f"worse than predicting the mean label for every row. {advice}"
    )


# Comparisons.


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of a number, such as step time, over repeated runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the values of repeated runs; None if a value is None."""
        numbers = list(values)
        if not numbers or None in numbers:
            return None
        known = [value for value in numbers if value is not None]
        return cls(statistics.median(known), min(known), max(known))

    def times(self) -> str:
        """Format a ratio such as "1.2x" and its range; say if the range includes 1."""
        shown = f"{self.median:.3g}x"
        if self.least == self.most:
            return shown
        within = "\nno difference shown" if self.least < 1 < self.most else ""
        return f"{shown}\n{self.least:.3g}x to {self.most:.3g}x{within}"


@dataclass(frozen=True)
class Comparison:
    """Results of runs with the same batches and initial weights. The first variant is the baseline.

    Attributes:
        rounds: dicts from variant to result; one dict per repetition, in which each variant ran.
        shardings: True if the variants are sharding plugins, False if they are ``baseline`` and
            ``plugins``.
        wire: ``training.wire`` of the variant with plugins.
    """

    rounds: Sequence[Mapping[str, Result]]
    shardings: bool = False
    wire: str = "fp32"

    @property
    def first(self) -> str:
        """Return the name of the baseline variant."""
        return next(iter(self.rounds[0]))

    def loss_max_abs_diff(self, variant: str) -> float:
        """Return the largest loss difference to the baseline in any step; NaN if a loss is NaN."""
        return float(self._loss_diffs(variant).max())

    def losses_text(self, variant: str) -> str:
        """Return sentences on how closely the losses of a variant and the baseline agree."""
        diffs = self._loss_diffs(variant)
        most, steps = float(diffs.max()), len(diffs)
        if most <= _ROUNDING:
            agree = f"agree within {most:.1e}" if most else "are equal"
            return f"The losses of all {steps} steps {agree}."
        first = int((~(diffs <= _ROUNDING)).argmax()) + 1
        text = (
            f"The losses of {steps} steps first differ by more than {_ROUNDING:.0e} at step "
            f"{first}, and by at most {most:.1e}. "
        )
        if self.wire != "fp32":
            return f"{text}The plugins use training.wire: {self.wire}, the baseline uses fp32."
        others = "" if most <= _GROWN else ", or the plugins compute other values"
        return f"{text}Training amplifies rounding{others}."

    def _loss_diffs(self, variant: str) -> NDArray[np.float64]:
        """Return the largest loss difference to the baseline in each step, over all repetitions."""
        base, other = (
            np.array([each[name].losses for each in self.rounds]) for name in (self.first, variant)
        )
        return np.abs(other - base).max(axis=0)

    def spreads(self, variant: str) -> dict[str, Spread | None]:
        """Return a dict from figure, such as step time, to its spread over a variant's runs."""
        found = [figures(each[variant]) for each in self.rounds]
        return {name: Spread.of(_values(found, name)) for name in found[0]}

    def ratios(self, variant: str) -> dict[str, Spread | None]:
        """Return a dict from figure, such as step time, to its ratio to the baseline, or None."""
        found = [figures(each[variant]) for each in self.rounds]
        bases = [figures(each[self.first]) for each in self.rounds]
        return {
            name: Spread.of(
                value / base if value is not None and base else None
                for value, base in zip(_values(found, name), _values(bases, name), strict=True)
            )
            for name in found[0]
        }

    def as_json(self) -> dict[str, Any]:
        """Return the JSON output of ``recd run --compare`` or of several ``--sharding`` options."""
        results = {name: result.as_json() for name, result in self.rounds[0].items()}
        spreads = {name: self.ratios(name) for name in results}
        ratios = {
            name: {figure: each and each.median for figure, each in of.items()}
            for name, of in spreads.items()
        }
        apart = {name: self.loss_max_abs_diff(name) for name in results}
        if self.shardings:
            report = {"shardings": results, "ratios": ratios, "loss_max_abs_diff": apart}
        else:
            shown = {"ratios": ratios["plugins"], "loss_max_abs_diff": apart["plugins"]}
            report = {**results, **shown}
        if len(self.rounds) > 1:
            report["rounds"] = {
                name: {
                    figure: {"value": value and asdict(value), "ratio": ratio and asdict(ratio)}
                    for (figure, value), ratio in zip(
                        self.spreads(name).items(), spreads[name].values(), strict=True
                    )
                }
                for name in results
            }
        return report

    def table(self) -> Table:
        """Return a table with one column per variant; five variants fit into 80 characters."""
        results = self.rounds[0]
        headings = [name.replace(".", ".\n").replace("_", "_\n") for name in results]
        table = text_table("the same batches and initial weights", [""], headings)
        table.columns[0].min_width = len("  all_to_all")
        found = [(self.spreads(name), self.ratios(name)) for name in results]
        units = {n: unit for each in results.values() for n, (_, unit) in figures(each).items()}
        for figure, unit in units.items():
            cells = []
            for values, ratios in found:
                value, over = _shown(values.get(figure), unit), ratios.get(figure)
                times = "" if over is None else over.times()
                cells.append(value if times in ("", "1x") else f"{value}\n{times}")
            if {*cells} <= {bytes_text(0), "-"} and unit == "B":
                continue
            table.add_row(figure_words(figure), *cells)
        apart = {name: self.loss_max_abs_diff(name) for name in results}
        if self.shardings:
            _, *differ = (f"{each:.1e}" for each in apart.values())
            table.add_row("losses differ by at most", "", *differ)
        table.caption = f"A value like 1.2x is the ratio to {self.first}. Ratios of 1 are omitted."
        if len(self.rounds) > 1:
            table.caption += f" Values are medians of {len(self.rounds)} rounds, with their range."
        if not self.shardings:
            table.caption = f"{self.losses_text('plugins')} {table.caption}"
        return table


def of_seeds(results: Mapping[int, Result]) -> dict[str, Any]:
    """Return the JSON of ``recd run --seeds``, with mean and standard deviation of each figure."""
    spreads = {
        name: {"mean": statistics.fmean(values), "stdev": statistics.stdev(values)}
        for name, (values, _) in _of_every_seed(results).items()
    }
    return {"seeds": {seed: each.as_json() for seed, each in results.items()}, "spread": spreads}


def seed_table(results: Mapping[int, Result], folders: Mapping[int, Path | None]) -> Table:
    """Return a table with the mean, standard deviation and values of each metric."""
    columns = ["mean", "stdev", *(f"seed {seed}" for seed in results)]
    table = text_table(f"{len(results)} seeds", [""], columns)
    for name, (values, unit) in _of_every_seed(results).items():
        if name.startswith((*_OF_SPLIT, "last_")) and not name.endswith("_samples"):
            shown = (statistics.fmean(values), statistics.stdev(values), *values)
            table.add_row(figure_words(name), *(figure_text(value, unit) for value in shown))
    if any(folders.values()):
        table.add_row("saved to", "", "", *(str(folders[seed] or "-") for seed in results))
    validations = [each.validation for each in results.values() if each.validation]
    if any(each.curve.best_step and each.split == "test" for each in validations):
        table.caption = "Test figures are optimistic: the test split selected the best step."
    return table


def _of_every_seed(results: Mapping[int, Result]) -> dict[str, tuple[list[float], str]]:
    """Return the values and unit of each figure that all runs have."""
    found = [figures(result) for result in results.values()]
    rows = {}
    for name, (_, unit) in found[0].items():
        known = [value for value in _values(found, name) if value is not None]
        if len(known) == len(found):
            rows[name] = known, unit
    return rows


def in_rounds(variants: Sequence[S], rounds: int, train: Callable[[S], T]) -> list[dict[str, T]]:
    """Train each variant ``rounds`` times; return one dict from variant to result per round.

    The order is reversed in every other round, so a drift of the machine's speed affects all
    variants equally.
    """
    found: list[dict[str, T]] = []
    for number in range(rounds):
        turn = list(variants) if number % 2 == 0 else list(reversed(variants))
        results = {variant: train(variant) for variant in turn}
        found.append({variant: results[variant] for variant in variants})
    return found


def _shown(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return figure_text(None, unit)
    middle = figure_text(spread.median, unit)
    if spread.least == spread.most:
        return middle
    return f"{middle}\n{figure_text(spread.least, unit)} to {figure_text(spread.most, unit)}"


def _values(
    rounds: Sequence[Mapping[str, tuple[float | None, str]]], name: str
) -> list[float | None]:
    return [each.get(name, (None, ""))[0] for each in rounds]
