"""Measures request latency when the user history is sent once or with each of 38 candidates.

python measure.py exported data/test
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from serve import Scorer, server

SHARED = ("user", "history", "history_category")
CANDIDATES = 38


def bodies(folder: Path, count: int) -> list[dict[str, bytes]]:
    """Return ``count`` JSON requests: ``once`` with one shared history, ``plain`` with repeats."""
    file = next(iter(sorted(folder.rglob("*.parquet"))))
    names = [*SHARED, "item", "category", "price"]
    rows = pq.read_table(file, columns=names).slice(0, count * CANDIDATES).to_pylist()
    found = []
    for first in range(0, len(rows), CANDIDATES):
        plain = rows[first : first + CANDIDATES]
        request = {name: plain[0][name] for name in SHARED}
        own = [{name: each[name] for name in each if name not in SHARED} for each in plain]
        found.append(
            {
                "once": json.dumps({"request": request, "candidates": own}).encode(),
                "plain": json.dumps({"request": {}, "candidates": plain}).encode(),
            }
        )
    return found


def post(connection: http.client.HTTPConnection, body: bytes) -> Any:
    """Send a scoring request, and return the parsed JSON response."""
    connection.request("POST", "/score", body, {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def measured(scorer: Scorer, sent: list[dict[str, bytes]], rounds: int) -> dict[str, Any]:
    """Send all requests ``rounds`` times in both forms, alternating, and return latencies in ms."""
    running = server(scorer)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", running.server_port)
    largest = 0.0
    for body in sent[:5]:
        once, plain = (post(connection, body[side])["scores"] for side in ("once", "plain"))
        largest = max(largest, *(abs(a - b) for a, b in zip(once, plain, strict=True)))
    by_round: dict[str, list[float]] = {"once": [], "plain": []}
    for number in range(rounds):
        times: dict[str, list[float]] = {"once": [], "plain": []}
        for index, body in enumerate(sent):
            sides = ("once", "plain") if (number + index) % 2 else ("plain", "once")
            for side in sides:
                start = time.perf_counter()
                post(connection, body[side])
                times[side].append(1e3 * (time.perf_counter() - start))
        for side, each in times.items():
            by_round[side].append(statistics.median(each))
    connection.close()
    running.shutdown()
    running.server_close()
    ratios = [plain / once for plain, once in zip(by_round["plain"], by_round["once"], strict=True)]
    return {
        "milliseconds": {side: _spread(each) for side, each in by_round.items()},
        "speed_up": _spread(ratios),
        "bytes": {side: statistics.median(len(body[side]) for body in sent) for side in by_round},
        "largest_difference": largest,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description="Measure the effect of sending histories once.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--program", default="model.pt2")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sent = bodies(options.table, options.requests)
    print(json.dumps(measured(Scorer(options.folder, options.program), sent, options.rounds)))


if __name__ == "__main__":
    main()
