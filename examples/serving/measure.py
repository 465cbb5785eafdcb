"""Starts serve.py and measures requests from several clients.

python measure.py exported data/test --scores scores.jsonl
python measure.py live data/test --follow 1 --rate 1000 --seconds 60
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow.parquet as pq

SHARED = ("user", "history", "history_category")
CANDIDATES = 38


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Run serve.py on a free port, and yield its URL."""
    script = str(Path(__file__).with_name("serve.py"))
    command = [sys.executable, script, str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (url := process.stdout.readline().strip()):
                raise RuntimeError("serve.py did not start. Its error message is above.")
            yield url
        finally:
            process.terminate()


def bodies(folder: Path, count: int, num_candidates: int = CANDIDATES) -> list[bytes]:
    """Return ``count`` JSON requests."""
    file = next(iter(sorted(folder.rglob("*.parquet"))))
    names = [*SHARED, "item", "category", "price"]
    rows = pq.read_table(file, columns=names).slice(0, count * CANDIDATES).to_pylist()
    found = []
    for first in range(0, len(rows), CANDIDATES):
        candidates = rows[first : first + CANDIDATES]
        request = {name: candidates[0][name] for name in SHARED}
        for row in candidates:
            for name in SHARED:
                del row[name]
        sent = {"request": request, "candidates": candidates[:num_candidates]}
        found.append(json.dumps(sent).encode())
    return found


def cached(sent: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the requests with a key, and the same requests without user features."""
    requests = [{**json.loads(body), "key": number} for number, body in enumerate(sent)]
    keyed = [json.dumps(each).encode() for each in requests]
    return keyed, [json.dumps({**each, "request": {}}).encode() for each in requests]


def post(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, Any]:
    """Send a scoring request, and return the status and the parsed JSON response."""
    connection.request("POST", "/score", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def measured(
    url: str,
    sent: list[bytes],
    rounds: int,
    clients: int,
    expected: list[float],
    first: list[bytes] | None = None,
) -> dict[str, float]:
    """Send all requests ``rounds`` times from parallel clients, and compare the scores.

    The requests ``first`` are sent once before, by default ``sent``.
    """

    def client(
        number: int, sent: list[bytes] = sent, rounds: int = rounds
    ) -> tuple[list[float], int, float]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        times, errors, largest = [], 0, 0.0
        for at in [*range(number, len(sent), clients)] * rounds:
            start = time.perf_counter()
            status, answer = post(connection, sent[at])
            times.append(1e3 * (time.perf_counter() - start))
            scores = answer.get("scores", [])
            wanted = expected[at * CANDIDATES : (at + 1) * CANDIDATES]
            errors += status != 200 or len(scores) != len(wanted)
            largest = max([largest, *(abs(a - b) for a, b in zip(scores, wanted, strict=False))])
        connection.close()
        return times, errors, largest

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda number: client(number, first or sent, 1), range(clients)))  # warm-up
        start = time.perf_counter()
        found = list(pool.map(client, range(clients)))
        seconds = time.perf_counter() - start
    times = [each for one, *_ in found for each in one]
    return {
        "requests_per_second": len(times) / seconds,
        "p50_ms": statistics.median(times),
        "p99_ms": statistics.quantiles(times, n=100)[98],
        "errors": sum(errors for _, errors, _ in found),
        "largest_difference": max(largest for *_, largest in found),
        "request_bytes": statistics.median(map(len, sent)),
    }


def steady(
    url: str, sent: list[bytes], seconds: float, rate: float, clients: int, first: list[bytes]
) -> dict[str, float]:
    """Send ``rate`` requests per second to a server that follows a run, if it can answer so many.

    The requests ``first`` are sent once before.
    """
    address = urlsplit(url).netloc
    start = time.perf_counter() + 1

    def client(number: int) -> tuple[list[float], int]:
        connection = http.client.HTTPConnection(address, timeout=30)
        for at in range(number, len(first), clients):
            post(connection, first[at])
        times: list[float] = []
        errors, at, due = 0, number, start + number / rate
        while (now := time.perf_counter()) < start + seconds:
            time.sleep(max(0, due - now))
            before = time.perf_counter()
            errors += post(connection, sent[at % len(sent)])[0] != 200
            times.append(1e3 * (time.perf_counter() - before))
            at, due = at + clients, due + clients / rate
        connection.close()
        return times, errors

    ages, versions = [], set()
    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number) for number in range(clients)]
        while not all(each.done() for each in running):
            time.sleep(0.5)
            health = http.client.HTTPConnection(address, timeout=30)
            health.request("GET", "/health")
            state = json.loads(health.getresponse().read())
            ages.append(state["seconds_since_training"])
            versions.add(state["version"])
        found = [each.result() for each in running]
    times = [each for one, _ in found for each in one]
    return {
        "requests_per_second": len(times) / seconds,
        "p50_ms": statistics.median(times),
        "p99_ms": statistics.quantiles(times, n=100)[98],
        "errors": sum(errors for _, errors in found),
        "freshness_seconds": statistics.median(ages),
        "versions": len(versions),
    }


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description="Measure the server of an exported model.")
    parser.add_argument("folder", type=Path, help="Output folder of recd export.")
    parser.add_argument("table", type=Path, help="Folder with the requests.")
    parser.add_argument("--scores", type=Path, help="JSON lines of recd predict.")
    parser.add_argument("--program", help="Option of serve.py.")
    parser.add_argument("--follow", help="Option of serve.py.")
    parser.add_argument("--rate", type=float, default=1_000, help="Requests/s, with --seconds.")
    parser.add_argument("--seconds", type=float, help="Measure for so long, with --follow.")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="With --seconds.")
    parser.add_argument("--cached", action="store_true", help="Send user features only once.")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    count = CANDIDATES if options.seconds is None else options.candidates
    sent = bodies(options.table, options.requests, count)
    first, sent = cached(sent) if options.cached else (sent, sent)
    words = [("--program", options.program), ("--follow", options.follow)]
    with served(options.folder, *(word for pair in words if pair[1] for word in pair)) as url:
        if options.seconds is not None:
            load = options.seconds, options.rate, options.clients
            print(json.dumps(steady(url, sent, *load, first)))
            return
        with options.scores.open(encoding="utf-8") as lines:
            expected = [json.loads(line)["score"] for line in lines]
        print(json.dumps(measured(url, sent, options.rounds, options.clients, expected, first)))


if __name__ == "__main__":
    main()
