"""``recd bench scars``: small tables, the real parts."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.benchmarks.tiny import measured

from recd_plugin_scars.benchmarks import scars, theory
from recd_plugin_scars.benchmarks.cells import (
    SIDES,
    Cells,
    Workload,
    criteo_shape,
    measure_cells,
    prepare,
)
from recd_plugin_scars.benchmarks.criteo import CARDINALITIES, EMBEDDING_DIM, ScaledCriteo, draw
from recd_plugin_scars.benchmarks.model import Initial
from recd_plugin_scars.benchmarks.paper_tables import DeviceWorkload, measure_on_device
from recd_plugin_scars.benchmarks.sizes import SIZES
from recd_plugin_scars.benchmarks.trainers import Trained
from recd_plugin_scars.planning import CachePlan, TableLoad
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugins.access.distributions import zipf
from recd_plugins.cli import main
from recd_plugins.errors import RecdError
from recd_plugins.testing.benchmark import Findings

SMALL = SIZES["tiny"].cells


@pytest.fixture(scope="module")
def cells() -> Cells:
    return cast(Cells, measured("scars", "measure_cells"))


@pytest.mark.parametrize(("exponent", "reduction"), [(1.0, 15.7), (1.1, 31.8), (1.2, 76.9)])
@pytest.mark.parametrize("scale", [16, 64])
def test_scaled_tables_have_the_ratios_of_the_large_ones(
    exponent: float, reduction: float, scale: int
) -> None:
    criteo = ScaledCriteo(scale, exponent)
    loads = {access.table: TableLoad(access, EMBEDDING_DIM) for access in criteo.accesses()}
    assert [load.num_embeddings for load in loads.values()] == list(criteo.rows)
    assert sum(CARDINALITIES) == 49_126_297
    plan = CachePlan.within(
        loads,
        260 * criteo.cached_rows,
        batch_size=criteo.batch_size,
        optimizer="rowwise_adagrad",
    )
    tables = [table.traffic for table in plan.tables.values()]
    assert sum(table.cached for table in plan.tables.values()) == criteo.cached_rows
    lookups, misses = (sum(getattr(t, what) for t in tables) for what in ("lookups", "misses"))
    assert lookups / misses == pytest.approx(reduction, abs=0.05)


def test_ids_are_drawn_as_often_as_they_are_to_be_read() -> None:
    access = zipf("t", 50, 1.0, 1.1, seed=3)
    ids = draw(access, np.random.default_rng(0), 40, 5000)
    counts = np.bincount(ids.ravel(), minlength=50) / ids.size
    assert ids.shape == (40, 5000)
    assert counts[access.rows] == pytest.approx(access.probabilities(), abs=0.002)
    assert (np.diff(ids[0]) < 0).any()


def test_first_weights_are_the_same_in_one_piece_and_in_several() -> None:
    whole, parts = Initial(3)(torch.empty(100, 4)), Initial(3)
    assert torch.equal(torch.cat([parts(torch.empty(60, 4)), parts(torch.empty(40, 4))]), whole)
    assert not torch.equal(Initial(4)(torch.empty(100, 4)), whole)


def test_what_is_moved_is_what_was_predicted(cells: Cells) -> None:
    figures = {figure.figure: figure for figure in cells.figures()}
    assert {
        "backing_store_traffic_reduction",
        "backing_store_traffic_reduction_zipf_1",
        "backing_store_traffic_reduction_zipf_1.2",
        "prediction_error",
        "miss_rate_static",
        "miss_rate_lfu",
        "miss_rate_lru",
        "samples_per_second_both_over_plain",
        "loss_max_abs_diff",
    } <= figures.keys()
    assert figures["prediction_error"].value <= 0.02
    assert figures["backing_store_traffic_reduction"].value == pytest.approx(31.3, rel=0.03)
    assert figures["backing_store_traffic_reduction_zipf_1"].value == pytest.approx(15.4, rel=0.05)
    assert figures["loss_max_abs_diff"].value <= 1e-6
    assert set(cells.predicted) == {
        *("plain", "coalesced", "cached", "both", "both, lookahead"),
    }
    static, lru = (figures[f"miss_rate_{policy}"].value for policy in ("static", "lru"))
    assert 0 < static < lru < 1
    assert cells.trained["coalesced"][0].miss_rate == 1


def test_a_loss_that_is_none_is_seen_on_every_side(cells: Cells) -> None:
    """Not overlooked where the plain side's is a number."""
    for side, (run, *_) in cells.trained.items():
        losses = [*run.losses[:-1], math.nan]
        trained = {**cells.trained, side: [replace(run, losses=losses)]}
        assert math.isnan(replace(cells, trained=trained).loss_max_abs_diff), side


def test_every_lookup_of_the_plain_side_is_counted_both_ways(cells: Cells) -> None:
    (plain,) = cells.trained["plain"]
    num_bytes = SMALL.num_batches * cells.batch_size * 26 * 4 * EMBEDDING_DIM
    assert plain.bytes_read == plain.bytes_written == num_bytes


def test_plots_are_drawn_from_the_report(cells: Cells, tmp_path: Path) -> None:
    found = Findings(cells.figures(), cells.details(), cells.notes())
    (path,) = scars.plot(asdict(found), tmp_path)
    assert "predicted" in path.read_text()
    with pytest.raises(RecdError, match="--plot draws what is moved"):
        scars.plot(asdict(Findings([], [], [])), tmp_path)


def test_theory_says_when_the_papers_claims_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(theory.VARIABLE, raising=False)
    monkeypatch.setattr(theory, "NUM_ROWS", 100_000)
    report = tmp_path / "theory.json"
    arguments = ["bench", "scars", "--theory", "--json", str(report), "--plot", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert "RECD_EMBEDDING_REUSE names no file" in "".join(found["notes"])
    assert "exponential 1000" in (tmp_path / "theory.svg").read_text()
    growth = {figure["figure"]: figure["value"] for figure in found["figures"]}
    assert growth["growth_zipf_1.1"] > 3
    assert growth["growth_exponential_100"] < 1.5 < growth["growth_exponential_1000"]
    # Of a batch that is large against the scale, distinct rows are scale * (ln(batch / scale) + c).
    thresholds = {row[0]: row[-1] for row in found["details"][-1]["rows"]}
    assert thresholds["exponential"] == pytest.approx(14, abs=0.5)
    assert thresholds["zipf"] == pytest.approx(2.33, abs=0.03)


HISTOGRAM = """\
one table
Locality stats after processing 1 batches of size 4
Avg # of indices: 12
Avg # of unique cols: 6
(0, 1]: 0.500
(1, 3]: 0.500
Histogram of accesses
(0, 1]: 0.250
(1, 3]: 0.750
"""


def test_histograms_of_reuse_are_part_of_theory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "reuse.txt"
    path.write_text(HISTOGRAM)
    monkeypatch.setattr(theory, "NUM_ROWS", 10_000)
    monkeypatch.setenv(theory.VARIABLE, str(path))
    once, more, _ = theory.measure_theory().details
    assert once.rows[-1][0] == more.rows[-1][0] == "one table"
    _, plain, coalesced, *_ = more.rows[-1]
    # 60 lookups of 6 rows read each of them.
    assert plain == pytest.approx(60 * 2 * 256 / 1e6, abs=1e-4)
    assert coalesced == pytest.approx(6 * 2 * 256 / 1e6, abs=1e-4)
    monkeypatch.setenv(theory.VARIABLE, str(tmp_path / "none.txt"))
    with pytest.raises(RecdError, match=r"none\.txt is no file"):
        theory.measure_theory()


def test_a_registry_with_a_cache_trains_the_same() -> None:
    pair = measured("scars", "measure_by_registry")
    (figure,) = pair.figures()
    assert figure.figure == "registry_loss_max_abs_diff"
    assert figure.value <= 1e-6
    assert "caches" in pair.cached.sections
    assert not pair.plain.sections


def test_the_sides_of_a_device_run_on_the_cpu_too() -> None:
    workload = DeviceWorkload(2048, num_batches=3, warmup=1, bottom=(16,), top=(16,))
    found = measure_on_device(workload, "cpu", threads=1)
    figures = {figure.figure: figure.value for figure in found.figures()}
    assert {"speedup_cached_batch_8192", "speedup_cached_25%_batch_16384"} <= figures.keys()
    assert figures["loss_max_abs_diff"] <= 1e-6
    moved = {name: run.bytes for name, run in found.trained[8192].items()}
    assert moved["cached"] < moved["cached 25%"] < moved["coalesced"] < moved["host"]
    assert len(found.details()[0].rows) == 8


def test_a_counter_that_says_nothing_is_an_error_of_the_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NothingCounted:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> NothingCounted:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, *_: Any) -> list[Trained]:
            return [Trained([0.5], [1.0], 0, 0, CacheTraffic())]

    monkeypatch.setattr("recd_plugin_scars.benchmarks.cells.Ranks", NothingCounted)
    found = measure_cells(Workload(512, 512, num_batches=2, warmup=1, turns=1))
    errors = {side: found.error(side) for side in found.predicted}
    assert errors == dict.fromkeys(("plain", "coalesced", "cached", "both", "both, lookahead"), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "rows"], "--only rows: the parts are theory, traffic, file, registry"),
        (
            ["--theory", "--only", "file"],
            "--theory and --only file are two parts: leave one out",
        ),
        (
            ["--only", "traffic", "--scale", "0"],
            "--scale 0: give 1 for tables as large as Criteo's, or up to 8192",
        ),
        (
            ["--only", "file", "--scale", "8"],
            "--scale 8 is of the part traffic, not of file: leave it out",
        ),
        (
            ["--theory", "--scale", "8"],
            "--scale 8 is of the part traffic, not of theory: leave it out",
        ),
    ],
)
def test_what_it_cannot_do_is_said(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "scars", *arguments])
    assert result.exit_code == 1
    assert result.stderr.endswith(message + "\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without CUDA alone")
def test_the_papers_tables_want_cuda() -> None:
    result = CliRunner().invoke(main, ["bench", "scars", "--device", "cuda"])
    assert result.exit_code == 1
    assert "torch sees no CUDA device here" in result.stderr


def test_jobs_travel_and_name_what_is_cached() -> None:
    criteo = ScaledCriteo(512)
    prepared = prepare(criteo, 2, 1, criteo_shape(criteo, (8,), (8,)))
    job = pickle.loads(pickle.dumps(prepared.job))
    caches = job.caches(SIDES["both"])
    assert sum(cache.num_cached_rows(rows) for cache, rows in zip(
        caches.values(), criteo.rows, strict=True
    )) == criteo.cached_rows  # fmt: skip
    none = job.caches(replace(SIDES["both"], cached=False))
    assert {cache.load_factor for cache in none.values()} == {0.0}
