"""``recd bench network``: its grid, its file of cells, its figures; and a cell on two ranks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recd_plugin_recd.benchmarks import network
from recd_plugin_recd.benchmarks.network.cells import MeasuredCells, measure_cells
from recd_plugin_recd.benchmarks.network.figures import CellFigures
from recd_plugin_recd.benchmarks.network.grid import Cell, Side, chosen
from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace
from recd_plugin_recd.benchmarks.network.one_side import bytes_between
from recd_plugin_recd.benchmarks.network.plots import draw
from recd_plugin_recd.benchmarks.network.ranks import Job, Measured, measure
from recd_plugin_recd.benchmarks.network.trace_plot import draw_traces
from recd_plugin_recd.benchmarks.network.workloads import write_registries
from recd_plugins.api import DataError, RecdError, SetupError
from recd_plugins.api.distributed import CollectiveBytes
from recd_plugins.testing import shaped_network
from recd_plugins.testing.benchmark import Findings
from recd_plugins.testing.gloo import run_on_ranks

CELL = Cell("papercal", "2x1", "200mbit")


def test_the_grid() -> None:
    cells, sides = chosen("reference", None)
    assert len(cells) == 3 * 3 * 4
    groups = {side.group for side in sides}
    assert groups == {"stock", "alone", "joined", "auto", "every"}
    assert len({side.name for side in sides}) == len(sides)
    cells, sides = chosen("small", "2x2, 4x1,50mbit,IKJT, joint, all coalesced")
    assert [cell.name for cell in cells] == ["papercal 4x1 50mbit", "papercal 2x2 50mbit"]
    (cell,), _ = chosen("small", "papercal,2x1,100mbit")
    assert (cell.num_nodes, cell.ranks_per_node, cell.bytes_per_second) == (2, 1, 12.5e6)
    ours = [side.name for side in sides if side.group != "stock"]
    assert ours == ["IKJT, joint, all coalesced"]
    assert cells[1].num_nodes == cells[1].ranks_per_node == 2
    assert cells[0].bytes_per_second == 6.25e6
    _, sides = chosen("small", "papercal,IKJT, auto without overlap,IKJT, auto")
    overlaps = {side.name: side.overlap for side in sides if side.overlap is None or not side.stock}
    assert overlaps == {
        "IKJT, auto": None,
        "IKJT, auto without overlap": False,
        "KJT, row-wise": False,
    }
    with pytest.raises(RecdError, match=r"--only: '3x1' is none of .*requests.*; did you mean"):
        chosen("small", "papercal,3x1,stock")
    with pytest.raises(RecdError, match="--only 'papercal': size tiny has one cell"):
        chosen("tiny", "papercal")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Side], dict[str, Measured]]:
    """A cell without links, on ranks that are there, as ``measure_cells`` has it."""
    _, sides = chosen("tiny", None)
    sides = [*sides, Side("auto", "auto", True, {"use": "no.such"})]
    files, refused = write_registries(CELL, sides, tmp_path_factory.mktemp("network"), "tiny")
    assert list(refused) == ["auto"]
    assert "no.such" in refused["auto"]
    stock = frozenset(side.name for side in sides if side.stock)
    job = Job(
        files,
        stock,
        frozenset(),
        1,
        num_batches=2,
        turns=1,
        steps=1,
        counts_links=False,
        traces=True,
    )
    measured = run_on_ranks(measure, 2, job)[0]
    for each in measured.values():
        each.stock_seconds = measured["stock planner"].seconds
        each.link_payload = 1.05 * each.payload_between
    return sides, {**measured, "auto": Measured(failure=refused["auto"])}


def test_sides_train_alike_and_what_they_send_is_counted(
    found: tuple[list[Side], dict[str, Measured]],
) -> None:
    _, measured = found
    stock, ours = measured["stock planner"], measured["IKJT, joint coalesced + planner"]
    assert stock.losses == pytest.approx(ours.losses, abs=1e-6)
    assert stock.payload_between > 2 * ours.payload_between
    # Of two nodes with a rank each, all leaves the node; each link carries about half.
    assert stock.payload / 2 == pytest.approx(stock.payload_between, rel=0.2)


def uneven(rank: int, world_size: int) -> tuple[float, int]:
    """Bytes to other nodes, and to all, of two collectives of 3 ranks on 2 nodes."""
    parts = [5, 10, 100]  # of 4 bytes, for each rank
    with CollectiveBytes() as counter:
        dist.all_to_all_single(
            torch.empty(3 * parts[rank]), torch.zeros(sum(parts)), [parts[rank]] * 3, parts
        )
        dist.all_reduce(torch.zeros(30))
    return bytes_between(counter, ranks_per_node=2), counter.total


def test_what_leaves_a_node_is_counted_by_the_rank_that_gets_it() -> None:
    ring = 2 * 2 * 40  # of each rank; those of ranks 1 and 2 go to the other node
    assert run_on_ranks(uneven, 3) == [
        (4 * 100, ring + 4 * 110),
        (ring + 4 * 100, ring + 4 * 105),
        (ring + 4 * 15, ring + 4 * 15),
    ]


def test_a_step_on_the_link(found: tuple[list[Side], dict[str, Measured]], tmp_path: Path) -> None:
    """There is no link, so all of the step is lost, to the stages that it has."""
    sides, measured = found
    figures = CellFigures(CELL, sides, measured)
    lost = figures.lost()
    assert lost is not None
    for _, step, carried, *by_stage, hidden in lost.rows:
        assert sum(map(float, by_stage)) == pytest.approx(float(step))
        assert float(carried) == pytest.approx(0.0, abs=1e-6)
        assert float(by_stage[3]) > 0
        assert hidden == 0.0
    for each in measured["stock planner"].traces:
        assert {"all_to_all", "all_reduce"} <= {name for name, _, _ in each.collectives}
    draw_traces(tmp_path / "trace.svg", figures.traces())
    assert "stock planner" in (tmp_path / "trace.svg").read_text()


def test_what_a_step_leaves_unused() -> None:
    """2,000 bytes a second: full for 10 ms while it waits, half full while it computes."""
    trace = LinkTrace(
        20.0, [(0.0, 5, 7), (10.0, 25, 7), (20.0, 35, 8)],
        thread=[("all_to_all", 0.0, 10.0), ("gemm", 10.0, 16.0), ("other", 16.0, 20.0)],
    )  # fmt: skip
    assert trace.share(0, 10, 2000.0) == (1.0, 0.0)
    assert trace.lost(2000.0) == pytest.approx({"all_to_all": 0.0, "gemm": 3.0, "other": 2.0})
    assert trace.hidden() == pytest.approx(11 / 31)


def test_figures_a_table_and_a_picture(
    found: tuple[list[Side], dict[str, Measured]], tmp_path: Path
) -> None:
    sides, measured = found
    figures = CellFigures(CELL, sides, measured)
    named = {figure.figure: figure.value for figure in figures.figures()}
    assert named["papercal_2x1_200mbit_counted_over_link_bytes"] == pytest.approx(1 / 1.05)
    assert named["papercal_2x1_200mbit_loss_max_abs_diff"] < 1e-6
    table = figures.table()
    rows = {row[0]: row for row in table.rows}
    assert rows["stock planner"][4] == 1.0
    assert figures.notes()[0].startswith("papercal 2x1 200mbit: auto is left out: ")
    (path,) = draw(asdict(Findings([], [table], [])), tmp_path)
    assert "joint coalesced" in path.read_text()


def made_up(milliseconds: float, predicted: float | None, stock: float = 100.0) -> Measured:
    """A side whose three turns are the same."""
    return Measured(
        seconds=[milliseconds / 1e3] * 3,
        stock_seconds=[stock / 1e3] * 3,
        processor_seconds=[0.1] * 3,
        num_batches=1,
        losses=[0.7] * 2,
        predicted_seconds=None if predicted is None else predicted / 1e3,
    )


def test_losses_of_two_rounds_are_compared() -> None:
    _, sides = chosen("small", "stock,auto")
    measured = {side.name: replace(made_up(100, None), num_batches=4) for side in sides}
    for each in measured.values():
        each.losses = [0.7] * 12
    measured["IKJT, auto"].losses[7:] = [0.6, 0.9, 0.9, 0.9, 0.9]
    figures = CellFigures(CELL, sides, measured)
    named = {figure.figure: figure.value for figure in figures.figures()}
    assert named["papercal_2x1_200mbit_loss_max_abs_diff"] == pytest.approx(0.1)
    measured["IKJT, auto"].losses[:2] = [0.6, math.nan]  # behind another that differs
    lost = CellFigures(CELL, sides, measured)
    assert lost.notes() == [
        "papercal 2x1 200mbit: IKJT, auto is left out: its loss became no finite number"
    ]
    assert all(math.isfinite(figure.value) for figure in lost.figures())


def test_cells_that_were_measured_are_reported_by_themselves(tmp_path: Path) -> None:
    """A grid that is not done: no side is everywhere, one cell has no prediction."""
    path = tmp_path / "cells.json"
    grid = MeasuredCells(path, "small")
    first = {
        "stock planner": made_up(100, 129),
        "KJT, joint": made_up(90, 60),
        "IKJT, planner": made_up(50, 40),
        "KJT, auto": made_up(94, 94),
        # Of another run, in which everything took twice as long.
        "IKJT, auto": made_up(104, 150, stock=200),
    }
    grid.add(Cell("papercal", "4x1", "100mbit"), first)
    second = {"stock planner": made_up(100, None), "IKJT, auto": made_up(110, None)}
    grid.add(Cell("rm1", "2x1", "unshaped"), second)
    grid.add(Cell("rm1", "2x2", "1gbit"), {"IKJT, auto": Measured(failure="no memory")})
    found = network.run("small", cells=path, measured=True)
    assert found.notes == ["rm1 2x2 1gbit: IKJT, auto is left out: no memory"]
    figures = {figure.figure: figure.value for figure in found.figures}
    assert figures["predicted_within_1.3"] == 3 / 5
    assert figures["auto_predicted_within_1.3"] == 1 / 2
    assert figures["auto_within_5_percent_of_best"] == 2 / 3
    assert figures["auto_slower_than_stock"] == 1
    tables = {detail.title: detail.rows for detail in found.details}
    autos = {str(row[0]): row[1:] for row in tables["auto in all cells"]}
    kjt = [100 / 94, 94 / 90, "KJT, joint", 1.0]
    assert autos["papercal 4x1 100mbit: KJT, auto"] == pytest.approx(kjt)
    ikjt = [200 / 104, 52 / 50, "IKJT, planner", 150 / 104]
    assert autos["papercal 4x1 100mbit: IKJT, auto"] == pytest.approx(ikjt)
    assert autos["rm1 2x1 unshaped: IKJT, auto"] == pytest.approx(
        [1 / 1.1, 1.1, "stock planner", ""]
    )
    ((_, within, least, of, *_),) = tables["predicted over measured steps"]
    assert (within, least, of) == ("3 of 5", 60 / 90, "KJT, joint")
    paths = {drawn.name: drawn for drawn in network.plot(asdict(found), tmp_path)}
    assert {"network_grid.svg", "network_predicted.svg"} < paths.keys()
    assert "rm1 2x1 unshaped" in paths["network_grid.svg"].read_text()
    only = network.run("small", only="rm1", cells=path, measured=True)
    assert not any(figure.figure.startswith(("papercal", "predicted")) for figure in only.figures)
    with pytest.raises(RecdError, match="--only 'requests': no cell that was measured is left"):
        network.run("small", only="requests", cells=path, measured=True)
    with pytest.raises(RecdError, match="--measured: it takes a file that --cells wrote"):
        network.run("small", cells=tmp_path / "none", measured=True)


def test_what_is_in_the_file_is_not_measured_again(
    found: tuple[list[Side], dict[str, Measured]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides, measured = found
    path = tmp_path / "cells.json"
    MeasuredCells(path, "tiny").add(CELL, {"stock planner": measured["stock planner"]})
    MeasuredCells(path, "tiny").add(CELL, measured)
    again = MeasuredCells(path)
    without_traces = {name: replace(each, traces=[]) for name, each in measured.items()}
    assert again.of(CELL) == without_traces
    assert [again.has(CELL, side) for side in sides] == [True, True, False]
    module = "recd_plugin_recd.benchmarks.network.cells"
    monkeypatch.setattr(f"{module}.unavailable", lambda: None)
    monkeypatch.setattr(f"{module}.write_registries", None)
    kept = measure_cells([CELL], sides[:2], "tiny", path)
    assert kept.of(CELL) == without_traces
    path.write_text(json.dumps({"name": "wire"}))
    with pytest.raises(DataError, match="has no cells of recd bench network"):
        MeasuredCells(path)


def test_cells_of_another_size_or_version_are_not_taken_for_these(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    MeasuredCells(path, "small").add(CELL, {"stock planner": made_up(100, 100)})
    assert MeasuredCells(path).names() == [CELL.name]
    with pytest.raises(DataError, match=r"cells.json has cells of --size small .*; name another"):
        MeasuredCells(path, "reference")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "version": "0.0.1"}))
    with pytest.raises(DataError, match=r"by recd-plugins 0.0.1, and these would be"):
        MeasuredCells(path, "small")
    path.write_text(json.dumps(kept["cells"]))  # as earlier versions wrote it
    assert MeasuredCells(path).names() == [CELL.name]
    with pytest.raises(DataError, match=r"no cells .* that say of which size"):
        MeasuredCells(path, "small")


def test_two_benchmarks_with_one_file_keep_what_both_measured(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    one, other = MeasuredCells(path, "tiny"), MeasuredCells(path, "tiny")
    auto, planner = made_up(50, 50), made_up(100, 100)
    one.add(CELL, {"IKJT, auto": auto})
    other.add(Cell("rm1", "2x1", "unshaped"), {"stock planner": planner})
    other.add(CELL, {"stock planner": planner})
    one.add(Cell("rm1", "2x2", "1gbit"), {"stock planner": planner})
    assert len(MeasuredCells(path).names()) == 3
    assert MeasuredCells(path).of(CELL) == {"IKJT, auto": auto, "stock planner": planner}


def test_each_cell_has_its_own_best_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another cell may be slow here, so that what is compared with it looks fast."""
    module = "recd_plugin_recd.benchmarks.network.cells"
    cells, sides = chosen("small", "papercal,4x1,200mbit,50mbit,IKJT, auto")
    took = {
        "KJT, row-wise": (3.0, 3.0),
        "stock table-wise": (1.0, 2.0),
        "stock planner": (2.0, 1.0),
        "IKJT, auto": (0.5, 0.5),
    }

    def measured(cell: Cell, files: dict[str, Path], *_: object, **__: object) -> object:
        number = cells.index(cell)
        return {name: Measured([took[name][number]], predicted_seconds=0.0) for name in files}

    monkeypatch.setattr(f"{module}.unavailable", lambda: None)
    files = {side.name: Path(side.name) for side in sides}
    monkeypatch.setattr(f"{module}.write_registries", lambda *_: (files, {}))
    monkeypatch.setattr(f"{module}._measure", measured)
    kept = measure_cells(cells, sides, "small", None)
    for cell in cells:
        assert set(kept.of(cell)) == set(took)
        assert {tuple(each.stock_seconds) for each in kept.of(cell).values()} == {(1.0,)}


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shaped_network.shutil, "which", lambda tool: tool)
    shaped_network.unavailable.cache_clear()
    try:
        with pytest.raises(SetupError, match=r"recd bench network: .* need root"):
            measure_cells([CELL], [], "tiny", None)
    finally:
        shaped_network.unavailable.cache_clear()


def test_a_trace_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecdError, match="file"):
        network.run("tiny", trace=tmp_path / "file" / "x.svg")
