"""Predicts step times by number of ranks, under weak and strong scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugins.api import (
    RecdError,
    RunConfig,
    TrainingData,
    file_utils,
    measure_compute,
    plots,
    prepared_data,
    stage_costs,
    step_costs,
    study,
    text_table,
    topologies,
    topology_line,
)

#: Weak scaling fixes the rows per rank, strong scaling the global batch.
Scaling = Literal["weak", "strong"]
#: Label of stock TorchRec.
STOCK = "stock"


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted step time of a registry or stock TorchRec on ``ranks`` ranks, or a problem."""

    ranks: int
    batch_size: int
    seconds: stage_costs.StageTimes | None = None
    memory_bytes: int | None = None
    problem: str | None = None

    @property
    def milliseconds(self) -> float | None:
        """Return the predicted milliseconds per step; None if there is a problem."""
        return None if self.seconds is None else 1000 * self.seconds.total

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        seconds = self.seconds
        return {
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "step_seconds": None if seconds is None else seconds.total,
            "samples_per_second": (
                None if seconds is None else self.ranks * self.batch_size / seconds.total
            ),
            "stages": None if seconds is None else seconds.as_dict(),
            "memory_bytes": self.memory_bytes,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class ScalingReport:
    """Report of ``recd plan --scaling``: predicted step times of every variant.

    Attributes:
        topology: name of the topology.
        spec: the topology with the most nodes.
        batch_size: rows per rank under weak scaling.
        global_batch: rows of all ranks under strong scaling.
        points: predictions in ascending order of ranks, keyed by type of scaling and variant.
    """

    topology: str
    spec: topologies.TopologySpec
    batch_size: int
    global_batch: int
    points: Mapping[Scaling, Mapping[str, Sequence[ScalingPoint]]]

    def as_json(self) -> dict[str, Any]:
        """Return the values of ``recd plan --scaling --json``."""
        return {
            "topology": {"name": self.topology, **self.spec.model_dump()},
            "batch_size": self.batch_size,
            "global_batch": self.global_batch,
            **{
                kind: {
                    name: [each.as_json() for each in points] for name, points in variants.items()
                }
                for kind, variants in self.points.items()
            },
        }


@dataclass(frozen=True)
class _Side:
    registry: RunConfig
    data: TrainingData
    compute: step_costs.Compute
    is_plain: bool = False


def study_scaling(
    registries: Mapping[str, RunConfig],
    topology: str,
    spec: topologies.TopologySpec,
    global_batch: int,
    say: Callable[[str], None],
) -> ScalingReport:
    """Plan each registry, and stock TorchRec, for 1, 2, 4 ... up to ``spec.nodes`` nodes.

    Stock TorchRec trains the model of the first registry. Weak scaling keeps the batch size per
    rank of the first registry. Strong scaling divides ``global_batch`` by the number of ranks.
    """
    variants = _sides(registries, say)
    batch_size = next(iter(registries.values())).training.batch_size
    found: dict[Scaling, dict[str, list[ScalingPoint]]] = {
        kind: {name: [] for name in variants} for kind in ("weak", "strong")
    }
    powers = (2**power for power in range(spec.nodes.bit_length()))
    for nodes in dict.fromkeys([*powers, spec.nodes]):
        some = spec.model_copy(update={"nodes": nodes})
        rows: dict[Scaling, int] = {
            "weak": batch_size,
            "strong": max(1, global_batch // some.world_size),
        }
        for kind, points in found.items():
            for name, variant in variants.items():
                say(f"planning {name}, {kind} scaling, on {some.world_size:,} ranks")
                points[name].append(_point(variant, some, rows[kind]))
    return ScalingReport(topology, spec, batch_size, global_batch, found)


def _sides(registries: Mapping[str, RunConfig], say: Callable[[str], None]) -> dict[str, _Side]:
    variants = {}
    for name, registry in registries.items():
        say(f"counting the operations of the model in {name}")
        prepared_data.wrapped_dataset(registry).prepare()
        variants[name] = _Side(registry, study.data_of_model(registry), measure_compute(registry))
    first = next(iter(variants.values()))
    plain = replace(first.registry, sharding=(), cache=())
    return {STOCK: replace(first, registry=plain, is_plain=True), **variants}


def _point(variant: _Side, spec: topologies.TopologySpec, batch_size: int) -> ScalingPoint:
    registry = variant.registry.with_training({"batch_size": batch_size})
    try:
        candidate = study.with_plugins(registry, spec, variant.data)
        if variant.is_plain:
            candidate = candidate.as_plain()
        kept = candidate.activation_bytes(variant.compute, batch_size)
        planned = candidate.plan(spec.to_torchrec(), batch_size, kept)
    except RecdError as error:  # no plan fits, or it needs several nodes
        return ScalingPoint(spec.world_size, batch_size, problem=str(error))
    costs, compute = _costs(spec), variant.compute
    report = study.report_side(
        candidate, planned, spec, batch_size=batch_size, compute=compute, costs=costs
    )
    memory = int(report.memory_by_rank.max())
    return ScalingPoint(spec.world_size, batch_size, report.seconds, memory)


def _costs(spec: topologies.TopologySpec) -> stage_costs.StageCosts:
    """Return measured costs or, if there are none, lower bounds with an assumed latency."""
    costs = spec.costs or spec.least_costs
    if costs.all_to_all.collectives:
        return costs
    waiting = {"collectives": step_costs.collective_seconds(spec.device)}
    return costs.model_copy(update={"all_to_all": costs.all_to_all.model_copy(update=waiting)})


def render(report: ScalingReport) -> RenderableType:
    """Return the report for a terminal."""
    measured = "with measured costs" if report.spec.costs else "lower bound with assumed latency"
    return Group(
        topology_line(report.topology, report.spec),
        f"Predicted ms per step, {measured}",
        "",
        *(_table(report, kind) for kind in report.points),
        *_problems(report),
    )


def _problems(report: ScalingReport) -> Iterator[Text]:
    """Yield, per variant, the first reason why it has no plan."""
    for kind, variants in report.points.items():
        for name, points in variants.items():
            for point in points:
                if point.problem is not None:
                    said = f"{name}, {kind}, {point.ranks:,} ranks: {point.problem}"
                    if kind == "strong":
                        said += f" (of --global-batch {report.global_batch:,})"
                    yield Text(said)
                    break


def _words(report: ScalingReport, kind: Scaling) -> str:
    if kind == "weak":
        return f"Weak scaling: {report.batch_size:,} rows per rank"
    return f"Strong scaling: {report.global_batch:,} rows in total"


def _table(report: ScalingReport, kind: Scaling) -> Table:
    variants = report.points[kind]
    table = text_table(_words(report, kind), [], ["ranks", "rows per rank", *variants])
    for points in zip(*variants.values(), strict=True):
        times = (point.milliseconds for point in points)
        table.add_row(
            f"{points[0].ranks:,}",
            f"{points[0].batch_size:,}",
            *("no plan" if each is None else f"{each:,.2f}" for each in times),
        )
    return table


@plots.plot_style()
def plot(report: ScalingReport, path: Path) -> None:
    """Plot milliseconds per step over the number of ranks, for weak and strong scaling."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, (kind, variants) in zip(figure.subplots(1, 2), report.points.items(), strict=True):
        for name, points in variants.items():
            shown = [(each.ranks, ms) for each in points if (ms := each.milliseconds) is not None]
            color = {"color": plots.GREY} if name == STOCK else {}
            axes.plot(*zip(*shown, strict=True), marker="o", markersize=4, label=name, **color)
        ranks = [each.ranks for each in next(iter(variants.values()))]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [f"{each:,}" for each in ranks], fontsize="small", rotation=45)
        axes.set(title=_words(report, kind), xlabel="ranks", ylabel="ms of a step")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
    axes.legend()
    figure.suptitle(f"{report.topology}, predicted")
    file_utils.write_figure(path, figure)
