"""Access profiles computed from distributions or reuse histograms, in accesses per sample."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from recd_plugins.interfaces.access import TableAccess
from recd_plugins.runtime.errors import DataError

_BIN = re.compile(r"\(\s*(\d+)(?:,\s*(\d+)\s*\]|\+)\s*:\s*(\d+(?:\.\d*)?(?:e-?\d+)?)")
_BATCH = re.compile(r"Locality stats after processing 1 batches of size (\d+)")
# Half a unit in the last digit of printed shares.
_ROUNDING = 0.0005
_COUNT = re.compile(r"Avg # of (indices|unique cols):\s*(\d+)")


class _Options(TypedDict, total=False):
    cap: float | None
    seed: int | None
    features: tuple[str, ...]


def zipf(
    table: str,
    num_embeddings: int,
    length: float,
    exponent: float,
    *,
    shift: float = 0.0,
    **options: Unpack[_Options],
) -> TableAccess:
    """Return Zipf's law: the k-th most read row has ``C * (k + shift)^-exponent`` accesses.

    With a ``shift`` it is the Zipf-Mandelbrot law. See ``from_weights`` for the options.
    """
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64)
    weights += shift
    # Relative to the first weight, so that large exponents do not underflow to 0.
    weights /= weights[0]
    np.power(weights, -exponent, out=weights)
    return from_weights(table, weights, length, **options)


def exponential(
    table: str, num_embeddings: int, length: float, scale: float, **options: Unpack[_Options]
) -> TableAccess:
    """Return an exponential law: the k-th row has ``C * exp(-(k - 1) / scale)`` accesses.

    See ``from_weights`` for the options.
    """
    weights = np.exp(np.arange(num_embeddings, dtype=np.float64) / -scale)
    return from_weights(table, weights, length, **options)


def half_normal(
    table: str, num_embeddings: int, length: float, scale: float, **options: Unpack[_Options]
) -> TableAccess:
    """Return a half-normal law: the k-th row has ``C * exp(-((k - 1) / scale)^2 / 2)`` accesses.

    See ``from_weights`` for the options.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((np.arange(num_embeddings, dtype=np.float64) / scale) ** 2 / -2)
    return from_weights(table, weights, length, **options)


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
    """Return accesses in proportion to ``weights``.

    Args:
        table: name of the table.
        weights: float64 ``[known]``, non-increasing.
        length: L, accesses per sample.
        num_embeddings: number of rows of the table, by default the number of weights.
        cap: largest number of accesses per sample of a row: ``p = min(cap, C * weight)``.
        seed: seed of a random assignment of weights to rows; None keeps the order, so that row 0
            is read most.
        features: features that look the table up, by default one with the table's name.

    Raises:
        DataError: ``cap`` does not allow ``length`` accesses.
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
            f"have {length:g} accesses; lower the length or raise the cap"
        )
    # The smallest number of capped rows such that the next row stays below the cap.
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
    """Histogram of the number of reads per row in one batch.

    Attributes:
        name: name of the histogram in its file.
        batch_size: number of samples in the batch.
        accesses: number of reads in the batch.
        unique_rows: number of distinct rows in the batch.
        lower, upper: ascending bounds ``lower < reads <= upper``, float64 ``[bins]``. An open last
            bin ends at twice its lower bound.
        share_of_rows, share_of_accesses: share of each bin, float64 ``[bins]``.
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
        """Mean accesses per sample."""
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
    """Return accesses that reproduce a reuse histogram.

    Within a bin, reads fall from the upper to the lower bound. If the rounded shares of a bin
    contradict its bounds, its number of rows is derived from the geometric mean of the bounds.

    Args:
        table: name of the table.
        histogram: reuse histogram of a batch.
        num_embeddings: number of rows of the table, by default ``read_rows``.
        read_rows: number of rows that are read, by default ``histogram.unique_rows``.
        length: accesses per sample; by default the histogram's length, scaled with ``read_rows``.
        seed: as in ``from_weights``.
        features: features that look the table up.

    Raises:
        DataError: ``num_embeddings`` is less than ``read_rows``.
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
            "more rows"
        )
    if length is None:
        length = histogram.length * read_rows / histogram.unique_rows
    # Rounding errors of the large sums could make a difference increase.
    weights = np.minimum.accumulate(-np.diff(_remaining(histogram, rows, means, read_rows)))
    return from_weights(
        table, weights, length, num_embeddings=num_embeddings, seed=seed, features=features
    )


def _bins(histogram: ReuseHistogram) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the number of rows of each bin and their mean number of reads."""
    lower, upper = histogram.lower, histogram.upper
    share = histogram.share_of_accesses / histogram.share_of_accesses.sum()
    accesses = share * histogram.accesses
    stated = histogram.share_of_rows * histogram.unique_rows
    rounding = _ROUNDING * histogram.unique_rows
    with np.errstate(divide="ignore", invalid="ignore"):
        means = accesses / stated
        least, most = accesses / (stated + rounding), accesses / np.maximum(stated - rounding, 0)
    # Reads are whole numbers, so rows of the first bin are read once.
    middle = np.where(lower == 0, upper, np.sqrt(lower * upper))
    means = np.where((means > lower) & (means <= upper), means, np.clip(middle, least, most))
    # A mean on an edge of the bin would put all rows there.
    means = np.clip(means, lower + 1e-3 * (upper - lower), upper)
    return accesses / means, means


def _remaining(
    histogram: ReuseHistogram,
    rows: NDArray[np.float64],
    means: NDArray[np.float64],
    read_rows: int,
) -> NDArray[np.float64]:
    """Return the accesses without the i most read rows, for each i, ``[read_rows + 1]``."""
    at = np.linspace(float(rows.sum()), 0.0, read_rows + 1)
    starts = np.concatenate([[0.0], np.cumsum(rows)])
    below = np.concatenate([[0.0], np.cumsum(rows * means)])
    remaining = np.empty(read_rows + 1)
    # ``at`` falls: the least read rows fill the first bins.
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
    """Return the reads of the least read share ``part`` of a bin, per row of the bin."""
    if lower == 0:
        return part * mean
    # Reads increase like lower + (upper - lower) * part^k; this is k + 1.
    power = (upper - lower) / (mean - lower)
    return part * lower + (upper - lower) * part**power / power


def read_reuse_histograms(path: str | Path) -> dict[str, ReuseHistogram]:
    """Read the histograms in a file of https://github.com/facebookresearch/dlrm_datasets, by name.

    Raises:
        DataError: the file cannot be read or has another format.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    found = [_parse(path, block.strip()) for block in re.split(r"\n\s*\n", text) if block.strip()]
    if not found:
        raise DataError(f"{path}: no histogram of reuse in it")
    return {histogram.name: histogram for histogram in found}


def _parse(path: str | Path, block: str) -> ReuseHistogram:
    name = block.splitlines()[0]
    counts = {what: int(count) for what, count in _COUNT.findall(block)}
    batch = _BATCH.search(block)
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
            f"{path}: {name!r} is no histogram of reuse in the format of Meta's dlrm_datasets: "
            "expected batch size, indices, unique cols, and equal bins of rows and of accesses"
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
