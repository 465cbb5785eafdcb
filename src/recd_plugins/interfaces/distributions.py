"""Access profiles from distributions and from histograms of reuse.

Each has seen one sample, so accesses are probabilities and their sum is ``length``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.access import TableAccess
from recd_plugins.runtime.errors import DataError

_BIN = re.compile(r"\(\s*(\d+)(?:,\s*(\d+)\s*\]|\+)\s*:\s*(\d+(?:\.\d*)?(?:e-?\d+)?)")
_BATCH = re.compile(r"Locality stats after processing 1 batches of size (\d+)")
# Half of the last digit of shares.
_ROUNDING = 0.0005
_COUNT = re.compile(r"Avg # of (indices|unique cols):\s*(\d+)")


def zipf(
    table: str,
    num_embeddings: int,
    length: float,
    exponent: float,
    *,
    shift: float = 0.0,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * (k + shift)^-exponent`` times a sample, k from 1.

    Zipf's law; with a ``shift`` Zipf's and Mandelbrot's. ``from_weights`` describes the other
    arguments.
    """
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64)
    weights += shift
    # Relative to the first, so that large exponents do not end in zeros.
    weights /= weights[0]
    np.power(weights, -exponent, out=weights)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def exponential(
    table: str,
    num_embeddings: int,
    length: float,
    scale: float,
    *,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * exp(-(k - 1) / scale)`` times a sample, k from 1.

    ``from_weights`` describes the other arguments.
    """
    weights = np.exp(np.arange(num_embeddings, dtype=np.float64) / -scale)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def half_normal(
    table: str,
    num_embeddings: int,
    length: float,
    scale: float,
    *,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """The k-th most read row is read ``C * exp(-((k - 1) / scale)^2 / 2)`` times a sample.

    ``from_weights`` describes the other arguments.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((np.arange(num_embeddings, dtype=np.float64) / scale) ** 2 / -2)
    return from_weights(table, weights, length, cap=cap, seed=seed, features=features)


def from_weights(
    table: str,
    weights: NDArray[np.float64],
    length: float,
    *,
    num_embeddings: int | None = None,
    cap: float | None = None,
    seed: int | None = None,
    features: tuple[str, ...] = (),
) -> TableAccess:
    """Rows that are read in proportion to ``weights``.

    Args:
        table: its name.
        weights: float64 ``[known]``, non-increasing, some above 0.
        length: accesses of a sample: L.
        num_embeddings: rows of the table, those beyond ``weights`` are never read; as many as there
            are weights without it.
        cap: no row is read more than so many times a sample: ``p = min(cap, C * weight)``, with C
            chosen so that the sum is ``length``.
        seed: which row is read how often is drawn with it; without one, row 0 is read most, row 1
            next, and so on.
        features: that look it up; one of the table's name without them.

    Raises:
        DataError: ``length`` is out of reach under ``cap``.
    """
    if num_embeddings is None:
        num_embeddings = len(weights)
    accesses = _scaled(table, weights, length, cap)
    if seed is None:
        rows = np.arange(len(weights))
    else:
        rows = np.random.default_rng(seed).permutation(num_embeddings)[: len(weights)]
    total = float(accesses.sum())
    return TableAccess(table, features or (table,), num_embeddings, 1, rows, accesses, total)


def _scaled(
    table: str, weights: NDArray[np.float64], length: float, cap: float | None
) -> NDArray[np.float64]:
    if cap is None:
        return weights * (length / float(weights.sum()))
    read = int(np.count_nonzero(weights))
    if length > cap * read:
        raise DataError(
            f"table {table}: {read:,} rows that are read at most {cap:g} times a sample cannot "
            f"have {length:g} accesses; lower the length, or raise the cap"
        )
    # The number of capped rows is the least for which the next row stays below the cap.
    most = min(int(length / cap), len(weights) - 1) + 1
    rest = float(weights[most:].sum()) + np.cumsum(weights[:most][::-1])[::-1]
    fits = (length - cap * np.arange(most)) * weights[:most] <= cap * rest
    capped = int(fits.argmax()) if fits.any() else most
    accesses = np.full(len(weights), cap)
    if capped < len(weights):
        left = length - cap * capped
        tail = weights[capped:]
        accesses[capped:] = tail * (left / float(tail.sum()))
    return accesses


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
    """Read the histograms of a file, by name.

    The format is that of the statistics published with Meta's synthetic embedding traces
    (https://github.com/facebookresearch/dlrm_datasets): a block a trace, blank lines between them.

    Raises:
        DataError: the file cannot be read or has another format.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    found = [_parse(path, block) for block in blocks]
    if not found:
        raise DataError(f"{path}: no histogram of reuse in it")
    return {histogram.name: histogram for histogram in found}


def _parse(path: str | Path, block: str) -> ReuseHistogram:
    name = block.splitlines()[0]
    counts = {what: int(count) for what, count in _COUNT.findall(block)}
    batch = _BATCH.search(block)
    # A last bin without an upper bound is given twice its lower one.
    bins = np.array(
        [
            (float(lower), float(upper or 2 * float(lower)), float(share))
            for lower, upper, share in _BIN.findall(block)
        ]
    )
    half = len(bins) // 2
    if (
        batch is None
        or counts.keys() != {"indices", "unique cols"}
        or not half
        or not np.array_equal(bins[:half, :2], bins[half:, :2])
    ):
        raise DataError(
            f"{path}: {name!r} is no histogram of reuse: expected the lines 'Locality stats after "
            "processing 1 batches of size N', 'Avg # of indices: N', 'Avg # of unique cols: N' and "
            "the same bins '(LOWER, UPPER]: SHARE' of rows and of accesses"
        )
    lower, upper, share_of_rows = bins[:half].T
    return ReuseHistogram(
        name,
        int(batch[1]),
        counts["indices"],
        counts["unique cols"],
        lower,
        upper,
        share_of_rows,
        bins[half:, 2],
    )
