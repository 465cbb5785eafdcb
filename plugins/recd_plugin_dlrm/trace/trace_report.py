"""Trace profiles and synthetic traces as tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType

from recd_plugin_dlrm.trace.generator import (
    SHARES,
    TraceGenerator,
    worst_difference,
)
from recd_plugin_dlrm.trace.profile import TraceProfile
from recd_plugins.api import text_table

_SHOWN = (0.01, 0.05, 0.1, 0.5)


def render_profile(profile: TraceProfile) -> RenderableType:
    """Return a table of a profile, with an explanation of its columns."""
    headings = "accesses", "ids", "p0", "median", *(f"{share:.0%}" for share in _SHOWN)
    lines = text_table("", ["table"], headings)
    for name, trace in profile.tables.items():
        median = "-" if trace.median_distance is None else f"{trace.median_distance:,}"
        counts = f"{trace.accesses:,}", f"{len(trace.ids):,}", f"{trace.new_share:.4g}"
        rates = trace.hit_rates(trace.cache_sizes())
        shown = (f"{rates[np.searchsorted(SHARES, share)]:.1%}" for share in _SHOWN)
        lines.add_row(name, *counts, median, *shown)
    legend = (
        "p0: share of accesses to new ids. median: median LRU stack distance of other accesses. "
        "N %: hit rate of an LRU cache with N % of the ids."
    )
    return Group(f"Traces of {profile.source}", lines, legend)


def render_synthetic(traces: Sequence[TraceGenerator]) -> RenderableType:
    """Return a table of generated traces, compared with the originals."""
    lines = text_table("", ["table"], ["ids", "original", "p0", "p0 used", "worst"])
    for trace in traces:
        profile = trace.profile
        raised = trace.new_share > profile.new_share
        lines.add_row(
            profile.table,
            f"{trace.num_ids:,}",
            f"{len(profile.ids):,}",
            f"{profile.new_share:.4g}",
            f"{trace.new_share:.4g}" if raised else "-",
            f"{100 * worst_difference(profile, trace.counts):.2f} points",
        )
    return Group(
        lines,
        "ids, original: distinct ids of the synthetic and the original trace. p0: share of "
        "accesses to new ids. worst: largest difference of hit rates, for LRU caches with 1 % to "
        "50 % of the ids.",
    )
