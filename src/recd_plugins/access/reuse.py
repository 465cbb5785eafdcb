"""Access profiles from histograms of reuse: how many rows a batch reads once, twice, and so on.

The format is that of the statistics published with Meta's synthetic embedding traces
(https://github.com/facebookresearch/dlrm_datasets): one block a trace, blank lines between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recd_plugins.access.distributions import from_weights
from recd_plugins.access.table_access import TableAccess
from recd_plugins.errors import DataError

_BIN = re.compile(r"\(\s*(\d+)(?:,\s*(\d+)\s*\]|\+)\s*:\s*(\d+(?:\.\d*)?(?:e-?\d+)?)")
_BATCH = re.compile(r"Locality stats after processing 1 batches of size (\d+)")
# Half of the last digit of shares.
_ROUNDING = 0.0005
_COUNT = re.compile(r"Avg # of (indices|unique cols):\s*(\d+)")
# Lower and upper bound, and share.
_Bin = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class ReuseHistogram:
    """Rows of a batch by how often it reads them.

    Attributes:
        name: of the block in its file.
        batch_size: samples of the batch.
        accesses: of the whole batch.
        unique_rows: rows that it reads.
        lower, upper: bounds of the bins, ``lower < reads <= upper``, rising; float64 ``[bins]``. A
            last bin without an upper bound is given twice its lower one.
        share_of_rows, share_of_accesses: of each bin, float64 ``[bins]``; rounded, as the file has
            them.
    """

    name: str
    batch_size: int
    accesses: int
    unique_rows: int
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    share_of_rows: NDArray[np.float64]
    share_of_accesses: NDArray[np.float64]

    @property
    def length(self) -> float:
        """Mean accesses of a sample."""
        return self.accesses / self.batch_size


def from_reuse_histogram(
    table: str,
    histogram: ReuseHistogram,
    *,
    num_embeddings: int | None = None,
    read_rows: int | None = None,
    length: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """A table whose rows are read as often as the histogram says.

    A bin has as many rows as the file says, where these can have its accesses. Where the file's
    share of rows, of three digits, cannot be true, it has as many as have them at the geometric
    mean of its bounds, as far as rounding allows. Within a bin reads fall from its upper bound to
    its lower, so that they sum to the bin's. A bin whose share of accesses is 0.000 has no rows.

    Args:
        table: its name.
        histogram: what a batch reads.
        num_embeddings: rows of the table; ``read_rows`` without it.
        read_rows: rows that are read at all, ``histogram.unique_rows`` without it. Fewer are the
            means of neighbours by rank.
        length: accesses of a sample; without it that of the histogram, with fewer or more rows in
            proportion, so that probabilities stay.
        seed: as in ``distributions.from_weights``.
        features: that look it up.

    Raises:
        DataError: ``num_embeddings`` are less than the rows that are read.
    """
    read = histogram.share_of_accesses > 0
    histogram = replace(
        histogram,
        lower=histogram.lower[read],
        upper=histogram.upper[read],
        share_of_rows=histogram.share_of_rows[read],
        share_of_accesses=histogram.share_of_accesses[read],
    )
    rows, means = _bins(histogram)
    if read_rows is None:
        read_rows = histogram.unique_rows
    if num_embeddings is None:
        num_embeddings = read_rows
    if num_embeddings < read_rows:
        raise DataError(
            f"table {table}: it has {num_embeddings:,} rows, and {read_rows:,} are read; give it "
            "more rows, or read fewer"
        )
    if length is None:
        length = histogram.length * read_rows / histogram.unique_rows
    # Differences of large sums: rounding could let one rise.
    weights = np.minimum.accumulate(-np.diff(_remaining(histogram, rows, means, read_rows)))
    return from_weights(
        table, weights, length, num_embeddings=num_embeddings, seed=seed, features=features
    )


def _bins(histogram: ReuseHistogram) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of each bin, and the mean reads of one of them."""
    lower, upper = histogram.lower, histogram.upper
    share = histogram.share_of_accesses / histogram.share_of_accesses.sum()
    accesses = share * histogram.accesses
    stated = histogram.share_of_rows * histogram.unique_rows
    rounding = _ROUNDING * histogram.unique_rows
    with np.errstate(divide="ignore", invalid="ignore"):
        means = accesses / stated
        least, most = accesses / (stated + rounding), accesses / np.maximum(stated - rounding, 0)
    # The first bin's rows are all read once: reads are whole numbers.
    middle = np.where(lower == 0, upper, np.sqrt(lower * upper))
    means = np.where((means > lower) & (means <= upper), means, np.clip(middle, least, most))
    # An edge of the bin would be a mean of rows that are all on it.
    means = np.clip(means, lower + 1e-3 * (upper - lower), upper)
    return accesses / means, means


def _remaining(
    histogram: ReuseHistogram,
    rows: NDArray[np.float64],
    means: NDArray[np.float64],
    read_rows: int,
) -> NDArray[np.float64]:
    """Accesses of all but the i most read of ``read_rows`` rows, i from 0; ``[read_rows + 1]``."""
    at = np.linspace(float(rows.sum()), 0.0, read_rows + 1)
    starts = np.concatenate([[0.0], np.cumsum(rows)])
    below = np.concatenate([[0.0], np.cumsum(rows * means)])
    remaining = np.empty(read_rows + 1)
    # ``at`` is falling: rows that are read least fill the bins from the first on.
    edges = np.searchsorted(-at, -starts, side="right")
    edges[0], edges[-1] = read_rows + 1, 0
    for index in range(len(rows)):
        part = slice(edges[index + 1], edges[index])
        remaining[part] = below[index] + rows[index] * _filled(
            (at[part] - starts[index]) / rows[index],
            histogram.lower[index],
            histogram.upper[index],
            means[index],
        )
    return remaining


def _filled(
    part: NDArray[np.float64], lower: float, upper: float, mean: float
) -> NDArray[np.float64]:
    """Reads of the least read ``part`` of a bin's rows, a row; its whole is ``mean``.

    Reads rise as ``lower + (upper - lower) * part^k``, with k such that this is their mean.
    """
    if lower == 0:
        return part * mean
    # k + 1; a mean of the upper bound would be k = 0.
    power = (upper - lower) / (mean - lower)
    return part * lower + (upper - lower) * part**power / power


def read_reuse_histograms(path: str | Path) -> dict[str, ReuseHistogram]:
    """The histograms of a file by their names.

    Raises:
        DataError: the file cannot be read or has another format; says the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no text, so no histograms of reuse: {error}") from error
    found: dict[str, ReuseHistogram] = {}
    for start, lines in _blocks(text):
        histogram = _parse(path, start, lines)
        if histogram.name in found:
            raise DataError(f"{path}:{start}: {histogram.name!r} is the name of a block before too")
        found[histogram.name] = histogram
    if not found:
        raise DataError(f"{path}: no histogram of reuse in it")
    return found


def _blocks(text: str) -> list[tuple[int, list[str]]]:
    """Lines that stand together, and the number of the first."""
    blocks: list[tuple[int, list[str]]] = []
    together = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            together = False
        elif together:
            blocks[-1][1].append(line.strip())
        else:
            blocks.append((number, [line.strip()]))
            together = True
    return blocks


def _parse(path: Path, start: int, lines: list[str]) -> ReuseHistogram:
    batch_size = 0
    counts: dict[str, int] = {}
    histograms: list[list[_Bin]] = []
    last = ""
    for number, line in enumerate(lines, start):
        if match := _BATCH.fullmatch(line):
            batch_size = int(match[1])
        elif match := _COUNT.fullmatch(line):
            counts[match[1]] = int(match[2])
        elif line.startswith("("):
            if not last.startswith("("):
                histograms.append([])
            histograms[-1].append(_bin(f"{path}:{number}: {line!r}", line, histograms[-1]))
        last = line
    where = f"{path}:{start}: {lines[0]!r}"
    if not batch_size or counts.keys() != {"indices", "unique cols"} or not all(counts.values()):
        raise DataError(
            f"{where}: expected the lines 'Locality stats after processing 1 batches of size N', "
            "'Avg # of indices: N' and 'Avg # of unique cols: N'"
        )
    if len(histograms) != 2 or [bin[:2] for bin in histograms[0]] != [
        bin[:2] for bin in histograms[1]
    ]:
        raise DataError(
            f"{where}: expected two histograms of the same bins '(LOWER, UPPER]: SHARE', of rows "
            "and of accesses"
        )
    rows, accesses = (np.array(histogram) for histogram in histograms)
    if not rows[:, 2].any() or not accesses[:, 2].any():
        raise DataError(f"{where}: all shares are 0")
    if counts["indices"] < counts["unique cols"]:
        raise DataError(
            f"{where}: {counts['unique cols']} distinct ids are more than all {counts['indices']}"
        )
    return ReuseHistogram(
        name=lines[0],
        batch_size=batch_size,
        accesses=counts["indices"],
        unique_rows=counts["unique cols"],
        lower=rows[:, 0],
        upper=rows[:, 1],
        share_of_rows=rows[:, 2],
        share_of_accesses=accesses[:, 2],
    )


def _bin(where: str, line: str, before: Sequence[_Bin]) -> _Bin:
    """Lower and upper bound and share of a line, which follows ``before``."""
    match = _BIN.fullmatch(line)
    if match is None:
        raise DataError(f"{where} is no bin '(LOWER, UPPER]: SHARE' or '(LOWER+: SHARE'")
    lower = float(match[1])
    upper = float(match[2]) if match[2] else 2 * lower
    share = float(match[3])
    if lower != (before[-1][1] if before else 0.0) or upper <= lower:
        raise DataError(f"{where} is no bin that follows the one before")
    if share > 1:
        raise DataError(f"{where} has a share above 1")
    return lower, upper, share
