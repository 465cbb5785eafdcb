"""What a comparison of shardings says."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from recd_plugins.interfaces.callback import Quality
from recd_plugins.training.compare import ShardingComparison
from recd_plugins.training.result import Result

NAMES = [
    "torchrec.row_wise", "torchrec.data_parallel", "torchrec.column_wise", "flexshard.two_tier",
    "flexshard.three_tier",
]  # fmt: skip


def result(losses: list[float], all_to_all: float = 123_456_789.0) -> Result:
    return Result(
        samples_per_second=123_456.0,
        step_seconds=1.2345,
        collective_bytes={"all_to_all": all_to_all, "all_reduce": 1000.0},
        ids_looked_up=12_345_678.0,
        peak_memory_bytes=10**9,
        losses=losses,
        train=Quality(0.9, 0.7, 12_345_678),
        test=Quality(0.9, 0.7, 12_345_678),
    )


def test_the_first_is_the_yardstick() -> None:
    compared = ShardingComparison({"a.x": result([0.5, 0.25]), "b.y": result([0.5, 0.75], 0.0)})
    assert compared.loss_max_abs_diff("b.y") == 0.5
    report = compared.as_json()
    assert report["ratios"]["a.x"]["all_to_all_bytes"] == 1
    assert report["ratios"]["b.y"]["all_to_all_bytes"] == 0
    assert report["loss_max_abs_diff"] == {"a.x": 0, "b.y": 0.5}
    other_way = ShardingComparison({name: compared.results[name] for name in ("b.y", "a.x")})
    assert other_way.ratios("a.x")["all_to_all_bytes"] is None


def test_figures_and_headings_of_five_are_whole_in_80_columns() -> None:
    results = {name: result([0.6, 0.5], 1e6 * (i + 1)) for i, name in enumerate(NAMES)}
    shown = StringIO()
    Console(file=shown, width=80).print(ShardingComparison(results).table())
    words = shown.getvalue().split()
    for word in ("all_to_all", "collectives", "1234.5", "column_", "parallel", "flexshard."):
        assert word in words
    assert words.count("12,345,678") == 3 * len(NAMES)
    # Beside what the all-to-all sends, nothing differs.
    assert [word for word in words if word in ("1x", "2x", "5x")] == ["2x", "5x"] * 2
