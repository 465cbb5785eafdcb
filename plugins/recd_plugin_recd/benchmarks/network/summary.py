"""Figures and tables of all cells: how near ``auto`` is to the best, and predictions to steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recd_plugin_recd.benchmarks.network.figures import CellFigures
from recd_plugins.testing.benchmark import Detail, Figure

#: Predictions are to be within this factor of steps, ``auto`` within this one of the best.
PREDICTED_WITHIN, NEAR = 1.3, 1.05
_BYTES_WITHIN = 1.02
_SHARE = 0.9  # of cells that are to be so


def summary_figures(cells: Sequence[CellFigures]) -> Iterator[Figure]:
    """Shares of cells, of each with plain and with deduplicated batches; and of sides."""
    factors = [(name, each) for cell in cells for name, each in cell.predicted_over_step().items()]
    autos = {auto for cell in cells for auto in cell.autos}
    within = f"predicted_within_{PREDICTED_WITHIN:g}"
    yield from _share(within, [_is_within(each) for _, each in factors])
    yield from _share(
        f"auto_{within}", [_is_within(each) for name, each in factors if name in autos]
    )
    counted = [each for cell in cells for each in cell.counted_over_link().values()]
    predicted = [each for cell in cells for each in cell.predicted_over_link().values()]
    for name, over_link in (("counted", counted), ("predicted", predicted)):
        near_link = [_is_within(each, _BYTES_WITHIN) for each in over_link]
        yield from _share(f"{name}_bytes_within_2_percent", near_link)
    pairs = [(cell, auto) for cell in cells for auto in cell.autos]
    near = [
        cell.over(auto, best) <= NEAR for cell, auto in pairs if (best := cell.best_beside(auto))
    ]
    yield from _share("auto_within_5_percent_of_best", near)
    if pairs:
        slower = sum(cell.speedup(auto) < 1 for cell, auto in pairs)
        yield Figure.of("auto_slower_than_stock", [slower], unit="cells", better="lower", goal=0)


def summary_tables(cells: Sequence[CellFigures]) -> list[Detail]:
    """What the figures count, cell by cell; tables without a row are left out."""
    autos: list[list[str | float]] = []
    predictions: list[list[str | float]] = []
    for cell in cells:
        factors = cell.predicted_over_step()
        for auto in cell.autos:
            best = cell.best_beside(auto)
            near: list[str | float] = ["", ""] if best is None else [cell.over(auto, best), best]
            predicted: str | float = factors.get(auto, "")
            autos.append([f"{cell.name}: {auto}", cell.speedup(auto), *near, predicted])
        if factors:
            within = f"{sum(map(_is_within, factors.values()))} of {len(factors)}"
            by_factor = sorted(factors, key=factors.__getitem__)
            least, most = by_factor[0], by_factor[-1]
            predictions.append([cell.name, within, factors[least], least, factors[most], most])
    headings = ["", "stock's best over it", "it over the best", "which is", "predicted over step"]
    tables = [
        Detail("auto in all cells", headings, autos),
        Detail(
            "predicted over measured steps",
            ["", f"sides within {PREDICTED_WITHIN:g}", "least", "of", "most", "of"],
            predictions,
        ),
    ]
    return [table for table in tables if table.rows]


def _is_within(factor: float, most: float = PREDICTED_WITHIN) -> bool:
    return 1 / most <= factor <= most


def _share(figure: str, ones: Sequence[bool]) -> Iterator[Figure]:
    if ones:
        share = [sum(ones) / len(ones)]
        yield Figure.of(figure, share, unit="share", better="higher", goal=_SHARE)
