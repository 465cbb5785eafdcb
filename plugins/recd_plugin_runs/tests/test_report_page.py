"""Runs as a page: what stands out, figures, curves, and sections that nobody here knows."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.commands import invoke, recd
from tests.small_registry import write_registry

from recd_plugin_runs import report
from recd_plugin_runs.report import Run, findings, page, read_runs, runs_of
from recd_plugins.runtime.errors import RecdError


def a_run(**changed: Any) -> dict[str, Any]:
    quality = {"normalized_entropy": 0.9, "auc": 0.7, "num_samples": 64}
    return {
        "samples_per_second": 100.0,
        "step_seconds": 0.5,
        "collective_bytes": {"all_to_all": 2e6, "all_reduce": 1e6},
        "ids_looked_up": 640.0,
        "peak_memory_bytes": 1_000_000,
        "losses": [0.7, 0.6, 0.65],
        "train": quality,
        "test": None,
        "stages": None,
        "stalls": None,
        "ingestion": None,
        **changed,
    }


def test_a_page_needs_nothing_else_and_shows_what_any_part_reports() -> None:
    acme = {"rows": {"hot": 12345}, "kinds": ["<b>", "c"], "records": [{"a": 1}]}
    html = page([Run("", a_run(acme=acme))])

    assert not re.search(r"<(script|link|img|iframe)|url\((?!#)|@import|href=.http", html)
    assert "<td>rows hot</td><td>12,345</td>" in html
    assert "<td>kinds</td><td>&lt;b&gt;, c</td>" in html
    assert "{" not in html.split("</style>")[1].split("<svg")[0]
    assert "<td>samples per second</td><td>100</td>" in html


HOSTILE = "<img src=x onerror='a()'>\x1b]0;$\\bad$\"&"


def hostile(value: Any, kept: Container[str] = ()) -> Any:
    """The value with ``HOSTILE`` in each of its strings and in each key that is not kept."""
    if isinstance(value, dict):
        return {
            key if key in kept else f"{key} {HOSTILE}": hostile(item, kept)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [hostile(item, kept) for item in value]
    return f"{value} {HOSTILE}" if isinstance(value, str) else value


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    curve = {"steps": [1, 2], "values": [0.5, 0.6], "best_step": 2, "stopped_early": False}
    a = a_run(
        stages={"forward": 0.5},
        stalls={"share": 0.5, "shares": {"reader": 0.5}},
        test={"normalized_entropy": 2.0, "auc": 0.5, "num_samples": 4, "acme": 1.0},
        validation={"metric": "auc", "mode": "max", **curve},
        registry="sharding: []",
        settings=["training.steps=2"],
        acme={"rows": {"hot": ["text"]}, "more": [{"name": ["text"]}]},
    )
    kept = {*a, *a["stalls"], *a["test"], *a["validation"]} - {"acme"}
    for name in (f"{HOSTILE.replace('/', '')}.json", "b.json"):
        tmp_path.joinpath(name).write_text(json.dumps(hostile(a, kept)))
    html = page(read_runs(sorted(tmp_path.glob("*.json"))))
    assert "best after step 2" in html
    assert html.count("&lt;img src=x") > 20
    assert "<img" not in html


def test_runs_stand_side_by_side_with_ratios_to_the_first() -> None:
    faster = a_run(samples_per_second=250.0, collective_bytes={"all_to_all": 3e5})
    runs = [Run("before", a_run()), Run("after", faster)]

    html = page(runs)
    assert "<td>samples per second</td><td>100</td><td>250</td><td>2.5x</td>" in html
    assert list(findings(runs)) == [
        "after trains 2.50 times as many samples per second as before.",
        "after sends 0.10 times as many bytes as before.",
        "Losses of before and after agree within 0.0e+00.",
    ]


@pytest.mark.parametrize(("last", "equal"), [(0.65 + 1e-8, True), (0.66, False), (None, False)])
def test_equal_losses_are_told(last: float | None, equal: bool) -> None:
    runs = [Run("a", a_run()), Run("b", a_run(losses=[0.7, 0.6, last]))]
    assert ("Losses of a and b agree" in " ".join(findings(runs))) == equal
    assert "<h2>Losses</h2>" in page(runs)


def test_worse_than_the_base_rate_and_waiting_are_said() -> None:
    bad = {"normalized_entropy": 1.25, "auc": 0.5, "num_samples": 9}
    stalls = {"share": 0.4, "shares": {"fill": 0.3, "convert": 0.1}}
    said = " ".join(findings([Run("", a_run(test=bad, stalls=stalls))]))
    assert "40% of each step is spent waiting for data" in said
    assert "worse than predicting the mean label" in said


def test_files_of_one_run_and_of_comparisons_are_read_and_others_are_refused(
    tmp_path: Path,
) -> None:
    one, two, bad = (tmp_path / name for name in ("one.json", "two.json", "bad.json"))
    one.write_text(json.dumps(a_run()))
    two.write_text(json.dumps({"baseline": a_run(), "plugins": a_run(), "ratios": {}}))
    assert [run.name for run in read_runs([one])] == ["one"]
    assert [run.name for run in read_runs([two])] == ["baseline", "plugins"]
    names = [run.name for run in read_runs([one, two, one])]
    assert names == ["one (1)", "two baseline", "two plugins", "one (4)"]
    for text in ("{", "[]", '{"baseline": {}, "plugins": {}}'):
        bad.write_text(text)
        said = "the file is not valid JSON" if text == "{" else "the file contains no run"
        with pytest.raises(RecdError, match=f"bad.json: {said}"):
            read_runs([bad])


def test_the_command_writes_beside_the_first_run(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    one.write_text(json.dumps(a_run()))

    recd("report", one)
    assert (tmp_path / "one.html").read_text().startswith("<!doctype html>")

    assert "no results of a run" in invoke("report", ".").output, "a folder has no suffix"


def test_the_registry_of_a_run_stands_on_its_page() -> None:
    report = {"baseline": a_run(), "plugins": a_run(), "registry": "a: <b>\n", "settings": ["c=1"]}
    html = page(runs_of(report))
    assert html.count("<pre>a: &lt;b&gt;\n</pre>") == 1
    assert "<p>With c=1.</p>" in html


def test_rounds_give_medians_and_say_where_they_show_no_difference() -> None:
    def spread(*values: float) -> dict[str, float]:
        return dict(zip(("median", "least", "most"), values, strict=True))

    speeds = {
        "baseline": {"value": spread(100, 90, 120), "ratio": None},
        "plugins": {"value": spread(105, 80, 130), "ratio": spread(1.1, 0.9, 1.2)},
    }
    rounds = {name: {"samples_per_second": each} for name, each in speeds.items()}
    faster = a_run(samples_per_second=900.0)
    runs = runs_of({"baseline": a_run(), "plugins": faster, "rounds": rounds})
    found = next(findings(runs))
    assert found.startswith("plugins trains 1.10 (0.90 to 1.20) times as many samples per second ")
    assert found.endswith("as baseline, which is no significant difference.")
    cells = "<td>100</td><td>105</td><td>1.1x, 0.9x to 1.2x, no difference shown</td>"
    assert f"<td>samples per second</td>{cells}" in page(runs)


def test_recd_run_writes_the_page(cwd: Path) -> None:
    write_registry(cwd, training={"evaluate": False, "steps": 2})
    recd("run", "registry.yaml", "--html", "a.html")
    html = Path("a.html").read_text(encoding="utf-8")
    assert "<h2>Losses</h2>" in html
    assert "dlrm.random" in html


def test_separate_runs_are_sorted_and_their_settings_compared(tmp_path: Path) -> None:
    quality = {"auc": 0.7, "num_samples": 64}
    for number, (entropy, rate) in enumerate([(0.9, 1), (0.8, 2), (None, 3)], start=1):
        values = a_run(
            test=entropy and {**quality, "normalized_entropy": entropy},
            registry="training: {steps: 3, learning_rate: 1}",
            settings=[f"training.learning_rate={rate}"],
            calibration_bins=[[32, 0.2, 0.1], [32, 0.6, 0.5]],
        )
        tmp_path.joinpath(f"{number}.json").write_text(json.dumps(values))
    runs = read_runs(sorted(tmp_path.glob("*.json")))
    assert [run.name for run in runs] == ["2", "1", "3"]
    assert list(findings(runs)) == ["2 is best: normalized entropy 0.80000 on the test split."]
    html = page(runs)
    settings = html.split("Settings that differ")[1].split("</table>")[0]
    assert "<td>training.learning_rate</td><td>2</td><td>1</td><td>3</td>" in settings
    assert "training.steps" not in settings
    for heading in ("Losses", "Calibration", "Bytes of a step"):
        assert f"<h2>{heading}</h2>" in html
    assert "Time of a step" not in html, "there are no data stalls"


def test_seeds_have_a_spread_and_advice_is_said_once(tmp_path: Path) -> None:
    metrics = {"auc": 0.5, "num_samples": 64}
    seeds = {
        str(seed): a_run(test={**metrics, "normalized_entropy": entropy, "log_loss": entropy / 2})
        for seed, entropy in enumerate((1.2, 1.1, 1.3))
    }
    report = {"seeds": seeds, "spread": {}, "registry": "training: {steps: 3}", "settings": []}
    tmp_path.joinpath("a.json").write_text(json.dumps(report))
    runs = read_runs([tmp_path / "a.json"])
    assert [run.name for run in runs] == ["seed 1", "seed 0", "seed 2"]
    best, spread, advice = findings(runs)
    assert best.startswith("seed 1 is best")
    assert spread.endswith("in their seed: normalized entropy 1.20000, standard deviation 0.10000.")
    assert advice.endswith("The same applies to seed 0, seed 2.")
    for seed, values in seeds.items():
        figures = {"normalized_entropy": 0.8 - int(seed) / 10}
        values["validation"] = {"steps": [], "figures": figures}
    best = next(findings(runs_of(report)))
    assert best == "seed 2 is best: normalized entropy 0.60000 on the validation split."
    html = page(runs)
    assert "<h1>3 runs</h1>" in html
    assert "<td>0.65000</td><td>0.60000 ± 0.05000</td>" in html
    assert f"<td>base rate log loss</td>{'<td>0.50000</td>' * 3}<td></td>" in html


@pytest.fixture
def svg(monkeypatch: pytest.MonkeyPatch) -> Mock:
    mock = Mock(return_value="")
    monkeypatch.setattr(report, "_svg", mock)
    return mock


def test_losses_are_averaged_and_outliers_cut(svg: Mock) -> None:
    losses = [1000.0, *(0.5 + 0.1 * (step % 2) for step in range(999))]
    report.loss_plot([Run("", a_run(losses=losses))])
    (axes,) = svg.call_args.args
    raw, smooth = axes.lines
    assert np.ptp(raw.get_ydata()[5:]) > 0.09
    assert np.ptp(smooth.get_ydata()[60:-60]) < 0.01
    assert axes.get_ylim()[1] < 1


def test_the_best_validation_is_marked(svg: Mock) -> None:
    curve = {"metric": "auc", "steps": [1, 2, 3], "values": [0.5, 0.7, 0.6], "best_step": 2}
    report.validation_plot([Run("", a_run(validation=curve))], "auc")
    assert svg.call_args.args[0].lines[1].get_xydata().tolist() == [[2, 0.7]]
