"""How long a plan of many rows takes: ``python -m recd_plugin_flexshard.benchmarks.many_rows``.

A process of its own, as its peak of memory is what it tells.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from recd_plugin_flexshard.planning import Strategy, TableDemand, plan_tiers
from recd_plugin_flexshard.planning.paper import CLUSTER, OPTIONS

# Each of another popularity, so that rows of all tables take turns in the order that is cut.
EXPONENTS = (0.8, 1.0, 1.1, 1.2)
STRATEGIES: tuple[Strategy, ...] = ("two_tier", "three_tier", "joint")


def tables(rows: int) -> list[TableDemand]:
    """Four tables, of ``rows`` together, with 250 accesses of a sample each and no equal rows."""
    demands = []
    for exponent in EXPONENTS:
        p = np.arange(1.0, rows // len(EXPONENTS) + 1)
        np.power(p, -exponent, out=p)
        p *= 250 / p.sum()
        demands.append(TableDemand(f"zipf_{exponent}", len(p), 128, np.minimum(p, 1.0, out=p)))
    return demands


def main() -> None:
    """Print the seconds of each strategy, and the most memory that the process had."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=int, default=120_000_000, help="Of four tables together.")
    demands = tables(parser.parse_args().rows)
    for strategy in STRATEGIES:
        wall, processor = time.perf_counter(), time.process_time()
        plan = plan_tiers(demands, CLUSTER, strategy, OPTIONS)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(
            f"{strategy:10}  {wall:6.2f} s, {processor:5.2f} s of the processor, "
            f"{plan.a2a_reduction:.1%} of the all-to-all saved"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak * (1 if sys.platform == 'darwin' else 1024) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
