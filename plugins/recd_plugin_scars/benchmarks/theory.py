"""What is moved for a batch, by the distribution of its lookups, and what 5 times more costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recd_plugin_scars.benchmarks.criteo import BATCH_SIZE, EMBEDDING_DIM
from recd_plugin_scars.planning import TableLoad, TableTraffic, traffic
from recd_plugins.api import RecdError
from recd_plugins.api.access import (
    ReuseHistogram,
    TableAccess,
    exponential,
    from_reuse_histogram,
    half_normal,
    read_reuse_histograms,
    zipf,
)
from recd_plugins.testing.benchmark import Detail, Figure, Findings

VARIABLE = "RECD_EMBEDDING_REUSE"
TRAFFIC_TABLE = "MB moved for a batch, read and written"
MORE_TRAFFIC_TABLE = "the same of 5 times the rows and the batch"
#: Of the table, at 1x; ``CACHED_SHARE`` of them are cached, at 5x too, as memory does not grow.
NUM_ROWS = 1_000_000
CACHED_SHARE = 0.02
TIMES = 5
_TABLE = "t_ids"
# What SCARS says of 5 times the rows and the batch.
_CLAIMS = {"zipf": 2.0, "exponential": 1.5, "half-normal": 1.5}
_Make = Callable[[int], TableAccess]


@dataclass(frozen=True)
class Growth:
    """One distribution at 1x and at 5x.

    Attributes:
        name: of the distribution.
        once: traffic of a step at 1x.
        more: at 5x.
    """

    name: str
    once: TableTraffic
    more: TableTraffic

    @property
    def coalesced(self) -> float:
        """The factor by which distinct rows are more."""
        return self.more.unique_rows / self.once.unique_rows

    @property
    def both(self) -> float:
        """The factor by which distinct rows not cached are more; 1 where all are cached."""
        return self.more.misses / self.once.misses if self.once.misses > 1e-6 else 1.0

    @property
    def claim(self) -> float | None:
        """What SCARS says that it stays below, if it does."""
        return _CLAIMS.get(self.name.partition(" ")[0])

    @property
    def grows(self) -> tuple[float, float, str]:
        """Both factors, and the claim in words."""
        return self.coalesced, self.both, "" if self.claim is None else f"< {self.claim:g}"

    def row(self, moved: TableTraffic) -> list[str | float]:
        """The line of a table: MB of each kind."""
        kinds = (moved.plain_bytes, moved.coalesced_bytes, moved.cached_bytes, moved.bytes)
        return [self.name, *(round(kind / 1e6, 4) for kind in kinds)]


def measure_theory() -> Findings:
    """The table, the growth of each distribution, and where the paper's claims begin to hold."""
    found = [*_distributions(), *_histograms()]
    headings = ["", "plain", "coalesced", "cached", "both"]
    details = [
        Detail(TRAFFIC_TABLE, headings, [growth.row(growth.once) for growth in found]),
        Detail(
            MORE_TRAFFIC_TABLE,
            [*headings, "coalesced grows", "both grows", "paper"],
            [[*growth.row(growth.more), *growth.grows] for growth in found],
        ),
        _thresholds(),
    ]
    figures = [
        Figure.of(
            f"growth_{growth.name.replace(' ', '_').replace('-', '_')}",
            [growth.coalesced],
            unit="ratio",
            better="lower",
            paper=growth.claim,
        )
        for growth in found
        if growth.claim is not None
    ]
    return Findings(figures, details, list(_notes()))


def _distributions() -> Iterator[Growth]:
    for exponent in (1.0, 1.1, 1.2, 2.0, 2.3):
        make = partial(_zipf, exponent=exponent)
        yield _growth(f"zipf {exponent:g}", make)
    for name, law in (("exponential", _exponential), ("half-normal", _half_normal)):
        for scale in (100, 1_000, 10_000, 100_000):
            yield _growth(f"{name} {scale}", partial(law, scale=scale))


def _histograms() -> Iterator[Growth]:
    path = histogram_file()
    if path is None:
        return
    for histogram in read_reuse_histograms(path).values():
        yield _histogram_growth(histogram)


def histogram_file() -> Path | None:
    """The file of the real reuse histograms, if there is one.

    Raises:
        RecdError: the environment variable names no file.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    path = Path(given)
    if not path.is_file():
        raise RecdError(f"{VARIABLE}: {path} is no file")
    return path


def _growth(name: str, make: _Make) -> Growth:
    return Growth(
        name, _moved(make(NUM_ROWS), BATCH_SIZE), _moved(make(TIMES * NUM_ROWS), TIMES * BATCH_SIZE)
    )


def _histogram_growth(histogram: ReuseHistogram) -> Growth:
    """5 times the batch alone: of rows beyond those of its batch a histogram knows nothing."""
    read_rows = min(histogram.unique_rows, NUM_ROWS // 5)
    access = from_reuse_histogram(_TABLE, histogram, read_rows=read_rows)
    name = histogram.name.removesuffix(".pt")
    return Growth(
        name,
        _moved(access, histogram.batch_size),
        _moved(access, TIMES * histogram.batch_size),
    )


def _moved(access: TableAccess, batch_size: int) -> TableTraffic:
    cached = round(CACHED_SHARE * min(access.num_embeddings, NUM_ROWS))
    load = TableLoad(access, EMBEDDING_DIM)
    return traffic([load], {_TABLE: cached}, batch_size=batch_size, optimizer="sgd")[_TABLE]


def _zipf(rows: int, exponent: float) -> TableAccess:
    return zipf(_TABLE, rows, 1.0, exponent)


def _exponential(rows: int, scale: float) -> TableAccess:
    return exponential(_TABLE, rows, 1.0, scale)


def _half_normal(rows: int, scale: float) -> TableAccess:
    return half_normal(_TABLE, rows, 1.0, scale)


def _thresholds() -> Detail:
    """Where each claim begins to hold, at this many rows and this batch."""
    exponent = _where(lambda value: partial(_zipf, exponent=value), 1.0, 4.0, _CLAIMS["zipf"])
    rows: list[list[str | float]] = [["zipf", "exponent", "above", round(exponent, 2)]]
    for name, law in (("exponential", _exponential), ("half-normal", _half_normal)):

        def make(inverse: float, law: Callable[[int, float], TableAccess] = law) -> _Make:
            return lambda rows: law(rows, BATCH_SIZE / inverse)

        ratio = _where(make, 0.1, 1000.0, _CLAIMS[name])
        rows.append([name, "samples of the batch over its scale", "above", round(ratio, 1)])
    return Detail("where the paper's claims hold", ["", "what", "", "value"], rows)


def _where(make: Callable[[float], _Make], low: float, high: float, claim: float) -> float:
    """The parameter from which growth stays below a claim; growth falls with it."""
    for _ in range(12):
        middle = (low * high) ** 0.5
        if _growth_of(make(middle)) < claim:
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5


def _growth_of(make: _Make) -> float:
    # Fewer rows than the tables above: where a claim begins to hold, those beyond are hardly read.
    rows = NUM_ROWS // 5
    once, more = _moved(make(rows), BATCH_SIZE), _moved(make(TIMES * rows), TIMES * BATCH_SIZE)
    return more.unique_rows / once.unique_rows


def _notes() -> Iterator[str]:
    yield (
        f"one table of {NUM_ROWS:,} rows of {EMBEDDING_DIM} float32, {BATCH_SIZE} lookups a batch, "
        f"{CACHED_SHARE:.0%} of the rows cached; 5x: rows and batch, the cache as large as before. "
        "SCARS says of coalesced lookups that 5x costs less than 2x (Zipf) or 1.5x (exponential, "
        "half-normal)"
    )
    if histogram_file() is None:
        yield f"{VARIABLE} names no file, so the real reuse histograms are left out"
    else:
        yield (
            "histograms of reuse know no rows beyond those of their batch: 5x is the batch alone, "
            "and growth at least so much"
        )
