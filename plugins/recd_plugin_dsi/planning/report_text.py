"""The report of ``recd plan --readers`` in a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_dsi.planning.readers_report import ReaderPlan
from recd_plugins.api.ingestion import STALL_CAUSES
from recd_plugins.api.planning import size_text


def render(plan: ReaderPlan) -> RenderableType:
    """What was measured, what so many readers give, and what to set."""
    return Group(_measured(plan), "", _curve(plan), "", _needs(plan), Text(plan.advice()))


def _measured(plan: ReaderPlan) -> Table:
    table = _new("Seconds of a batch of one rank", "", "ms")
    making = plan.reading.making
    for cause in STALL_CAUSES:
        table.add_row(cause, f"{getattr(making, cause) * 1e3:.2f}")
    table.add_row("one reader", f"{plan.pace.making * 1e3:.2f}")
    table.add_row("  of processors", f"{plan.reading.cpu_seconds * 1e3:.2f}")
    table.add_row("unpacking, in the trainer", f"{plan.pace.arrival * 1e3:.2f}")
    table.add_row("trainer, on ready batches", f"{plan.training.seconds * 1e3:.2f}")
    table.add_row("  of processors", f"{plan.training.cpu_seconds * 1e3:.2f}")
    table.caption = f"{plan.batch_size:,} rows; medians"
    return table


def _curve(plan: ReaderPlan) -> Table:
    columns = "readers of a rank", "trainer waits", "on this machine", "cores of a node"
    table = _new(f"Waiting, by readers; wanted: at most {plan.target:.0%}", *columns)
    for point in plan.curve:
        chosen = point.readers == plan.readers
        table.add_row(
            f"{'* ' if chosen else ''}{point.readers}",
            f"{point.share:.1%}",
            f"{point.share_here:.1%}",
            f"{point.cores:.1f} of {plan.cores}",
            style="bold" if chosen else "",
        )
    return table


def _needs(plan: ReaderPlan) -> Text:
    readers = plan.readers or 0
    on_node = readers * plan.ranks_here
    memory = plan.reading.memory_bytes
    lines = [
        f"readers: {readers} of a rank, {on_node} of a node, {readers * plan.ranks} in all; "
        f"memory {size_text(memory)} each, {size_text(on_node * memory)} on a node",
        f"a batch has {size_text(plan.reading.batch_bytes)} on the wire: "
        f"{size_text(plan.bytes_per_second)}/s to a rank, "
        f"{size_text(plan.bytes_per_second * plan.ranks_here)}/s to a node",
    ]
    return Text("\n".join(lines if readers else lines[1:]))


def _new(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
