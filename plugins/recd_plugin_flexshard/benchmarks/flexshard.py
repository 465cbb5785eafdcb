"""FlexShard: the paper's tables next to ours, and tiers of rows trained on gloo ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugins.api import RecdError
from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size, largest

if TYPE_CHECKING:
    pass

SUMMARY = "FlexShard's tiers of rows: predicted, and measured on 4 x 2 ranks against row-wise"
HELP = {"only": "One part: tables, rm2, joint or drift."}

PARTS = ("tables", "rm2", "joint", "drift")


def workload(size: Size, *, only: str | None = None) -> str:
    """The input in words."""
    from recd_plugin_flexshard.benchmarks.sizes import SIZES

    sizes, parts = SIZES[size], _parts(only)
    words = {
        "tables": "plans for RM-1 to RM-4 on the paper's cluster",
        "rm2": f"a table like RM-2's with rows and batch / {sizes.rm2.scale}",
        "joint": f"PAPERCAL's {', '.join(sizes.papercal.features)}, "
        f"batch {sizes.papercal.batch_size}",
        "drift": f"a moving popularity in {sizes.phases} phases",
    }
    trained = f"; on {sizes.papercal.nodes} pretended nodes x 2 gloo ranks"
    return "; ".join(words[part] for part in parts) + ("" if parts == ("tables",) else trained)


def run(size: Size, *, only: str | None = None) -> Findings:
    """All parts, or one of them."""
    # Imported here: `recd bench` reads this module for its summary.
    from recd_plugin_flexshard.benchmarks.sizes import SIZES

    parts, sizes = _parts(only), SIZES[size]
    found = Findings([], [], [])
    losses: list[float] = []
    if "tables" in parts:
        from recd_plugin_flexshard.benchmarks import paper_tables

        _add(found, paper_tables.figures(), paper_tables.details(), paper_tables.notes())
    if parts == ("tables",):
        return found
    with _ranks(sizes.papercal.ranks) as ranks:
        if "rm2" in parts:
            from recd_plugin_flexshard.benchmarks.one_table_figures import measure_one_table

            table = measure_one_table(ranks, sizes.rm2, sizes.rm2_batches, sizes.rm2_turns)
            losses.append(table.loss_max_abs_diff)
            _add(found, table.figures(), table.details(), table.notes())
        if "joint" in parts:
            from recd_plugin_flexshard.benchmarks.papercal_figures import measure_papercal

            with tempfile.TemporaryDirectory() as folder:
                papercal = measure_papercal(ranks, sizes.papercal, Path(folder))
            losses.append(papercal.loss_max_abs_diff)
            _add(found, papercal.figures(), papercal.details(), [])
        if "drift" in parts:
            from recd_plugin_flexshard.benchmarks.drift import measure_drift

            drift = measure_drift(ranks, sizes.drift, sizes.phases, sizes.retier_every)
            _add(found, drift.figures(), drift.details(), [])
    if losses:
        found.figures.append(
            Figure.of(
                "loss_max_abs_diff", [largest(losses)], unit="loss", better="lower", goal=1e-6
            )
        )
    return found


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Bytes by tier, observed and predicted."""
    from recd_plugin_flexshard.benchmarks.plots import draw

    return draw(result, folder)


def _ranks(num: int) -> Any:
    from recd_plugin_flexshard.benchmarks.one_table_plans import RANKS_PER_NODE
    from recd_plugins.api.distributed import Ranks

    return Ranks(num, local_world_size=RANKS_PER_NODE)


def _add(
    found: Findings, figures: Sequence[Figure], details: Sequence[Detail], notes: Sequence[str]
) -> None:
    found.figures.extend(figures)
    found.details.extend(details)
    found.notes.extend(notes)


def _parts(only: str | None) -> tuple[str, ...]:
    if only is None:
        return PARTS
    if only not in PARTS:
        raise RecdError(f"--only {only}: the parts are {', '.join(PARTS)}")
    return (only,)
