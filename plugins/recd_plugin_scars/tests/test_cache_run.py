from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.commands import recd
from tests.covering import of_today

from recd_plugin_scars.report import CacheReport
from recd_plugin_scars.tests.cache_cases import CACHED, ROWS, train_each, write_registry
from recd_plugins.api import build_model, load_registry, measure_access, model_tables
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job

ROW_WISE, SHARDINGS = "torchrec.row_wise", ["torchrec.table_wise", "torchrec.column_wise"]
#: Each once; with them the ways to say how much, storage and lookahead.
OPTIONS: dict[str, dict[str, Any]] = {
    "static": {"rows": 100},
    "lru": {"policy": "lru", "share": 0.1, "lookahead": False},
    "lfu": {"policy": "lfu", "bytes": "20KB"},
    "what pays": {},
    "nothing": {"rows": 0},
    "everything": {"share": 1},
    "a file": {"rows": 100, "storage": {"file": "backing_store"}},
}
#: What runs by day besides others in turn: what it moves is compared.
ALWAYS = ["static", "what pays", "nothing"]
OTHERS = [each for each in (*OPTIONS, *SHARDINGS, "kjt", "compared") if each not in ALWAYS]
TODAY = [*ALWAYS, *of_today(OTHERS, 2)]


def by_sharding(use: str) -> dict[str, Any]:
    return {"sharding": [{"use": use, "tables": ["t_seq_*", "t_item_0"]}]}


def profile_of(table: Path, path: Path) -> Path:
    registry = load_registry(write_registry(path.with_suffix(".yaml"), table))
    tables = model_tables.tables_of(build_model(registry, registry.dataset.schema()))
    measure_access(registry, [each for each in tables if each.name in CACHED]).save(path)
    return path


@pytest.fixture(scope="module")
def results(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    sgd = {"training": {"optimizer": "sgd"}}
    # Counted once, as a run counts at start: of the others that do, it is a fourth of the time.
    counted = {"profile": str(profile_of(table, folder / "counted"))}
    of_run: dict[str, dict[str, Any]] = {
        "static": {},
        "what pays": {},
        "a file": {**counted, "storage": {"file": str(folder / "slow")}},
    }

    def write(name: str, options: dict[str, Any], **sections: Any) -> Path:
        return write_registry(folder / f"{name}.yaml", table, options, **sections, **sgd)

    paths = {
        name: write(name, {**options, **of_run.get(name, counted)}, **by_sharding(ROW_WISE))
        for name, options in OPTIONS.items()
    }
    for use in SHARDINGS:
        paths[use] = write(use, {"rows": 100, **counted}, **by_sharding(use))
    paths["kjt"] = write("kjt", {"rows": 100}, converter={"use": "recd.kjt"})
    jobs = {name: Job(path) for name, path in paths.items()}
    jobs["compared"] = Job(paths["static"], sharding="torchrec.column_wise")
    jobs = {name: jobs[name] for name in TODAY}
    jobs["plain"] = Job(paths["static"], "baseline")
    found = run_on_ranks(train_each, 2, list(jobs.values()))[0]
    assert not any(isinstance(each, str) for each in found), found
    return dict(zip(jobs, cast("list[Result]", found), strict=True))


@pytest.mark.parametrize("name", TODAY)
def test_training_stays_what_it_was(results: dict[str, Result], name: str) -> None:
    plain, cached = results["plain"].losses, results[name].losses
    assert max(plain) - min(plain) > 1e-4  # it learns
    assert np.abs(np.subtract(cached, plain)).max() <= 1e-6


@pytest.mark.parametrize("name", TODAY)
def test_what_moved_is_counted_and_predicted(results: dict[str, Result], name: str) -> None:
    report = results[name].sections["caches"]
    assert isinstance(report, CacheReport)
    assert [table.name for table in report.tables] == sorted(CACHED, key=CACHED.index)
    for table in report.tables:
        seen, expected = table.observed, table.predicted
        assert expected is not None
        assert seen.hits + seen.misses == seen.unique_rows <= seen.lookups
        row = (seen.bytes_read / seen.misses) if seen.misses else 0
        assert row in ((0, 16, 32) if "column" in name or name == "compared" else (0, 32))
        if name in ("everything", "what pays"):  # it knows every row that is read
            assert seen.bytes == expected.bytes == 0
            assert (table.cached_rows == ROWS) == (name == "everything")
        else:
            # Samples of one session read the same rows, but for those of the ranked item.
            assert 0.9 * seen.unique_rows <= expected.unique_rows
            assert table.ratio is not None
            if table.name == "t_item_0":  # of lru and lfu, a few steps after they started static
                assert 0.6 < table.ratio < 1.25


def test_recd_run_shows_caches(table: Path, tmp_path: Path) -> None:
    path = write_registry(tmp_path / "r.yaml", table, {"rows": 100})
    words = recd("run", path, "--ranks", 1, "--steps", 2, "--json", tmp_path / "run.json")
    assert "caches: traffic per step, summed over ranks" in words
    assert "100 (5.00%)" in words
    report = json.loads((tmp_path / "run.json").read_text())["caches"]
    assert list(report["tables"]) == CACHED
    item = report["tables"]["t_item_0"]
    assert item["cached_rows"] == 100
    assert item["share"] == 0.05
    assert item["policy"] == "static"
    assert item["observed"]["bytes_read"] == item["observed"]["misses"] * 36  # with state
    assert report["backing_store_bytes"]["predicted"] > 0


def test_recd_plan_shows_caches(table: Path, tmp_path: Path) -> None:
    path = write_registry(tmp_path / "r.yaml", table, {"rows": 123})
    words = recd("plan", path, "--json", tmp_path / "plan.json")
    assert "123 cached" in words
    tables = json.loads((tmp_path / "plan.json").read_text())["plugins"]["tables"]
    for each in tables:
        cached = each["name"] in CACHED
        assert each["cached_rows"] == (123 if cached else None)
        assert (each["compute_kernel"] == "fused_uvm_caching") == cached
