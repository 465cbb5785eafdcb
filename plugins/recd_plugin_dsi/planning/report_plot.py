"""The report of ``recd plan --readers`` as a picture."""

from __future__ import annotations

from pathlib import Path

from recd_plugin_dsi.planning.readers_report import ReaderPlan
from recd_plugins.api.files import write_figure
from recd_plugins.api.pages import plot_style


@plot_style()
def plot(plan: ReaderPlan, path: Path) -> None:
    """What the trainer waits by readers of a rank, with the target and the chosen number.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [point.readers for point in plan.curve]
    axes.plot(numbers, [point.share for point in plan.curve], "o-", label="a core for each reader")
    axes.plot(
        numbers,
        [point.share_here for point in plan.curve],
        "s--",
        label=f"on this machine: {plan.cores} cores",
    )
    axes.axhline(plan.target, color="gray", linestyle=":", label=f"wanted: {plan.target:.0%}")
    if plan.readers is not None:
        axes.axvline(plan.readers, color="red", alpha=0.4, label=f"{plan.readers} readers")
    axes.set(xlabel="readers of a rank", ylabel="trainer waits", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    write_figure(path, figure)
