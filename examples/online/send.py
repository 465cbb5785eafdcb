"""Sends requests of an online shop to a Kafka topic. New items appear all the time.

python send.py localhost:9092 --requests 2000
python send.py localhost:9092 --rate 100       # 100 requests per second, until Ctrl-C
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from confluent_kafka import Producer

USERS, ITEMS, CANDIDATES = 2_000, 500, 10


def impressions(first: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each request. Half of the users like items with even numbers."""
    for request in count(first):
        draw = np.random.default_rng(request)
        user = int(draw.integers(USERS))
        newest = ITEMS + request // 20  # a new item for every 20 requests
        items = newest - draw.zipf(1.2, size=(2, CANDIDATES)) % ITEMS
        shown, seen = items.tolist()
        likes = [item % 2 == user % 2 for item in shown]
        clicked = draw.random(CANDIDATES) < np.where(likes, 0.5, 0.05)
        yield [
            {
                "request": request,
                "time": time.time(),
                # As raw ids from a database would be.
                "user": user * 7_919_000_003,
                "item": item * 104_729_000_021,
                "history": [each * 104_729_000_021 for each in seen],
                "click": int(click),
            }
            for item, click in zip(shown, clicked, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers")
    parser.add_argument("--topic", default="impressions")
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--requests", type=int, help="number of requests; default: endless")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second")
    options = parser.parse_args()
    producer = Producer({"bootstrap.servers": options.servers})
    start = time.monotonic()
    for number, messages in enumerate(islice(impressions(options.first), options.requests)):
        time.sleep(max(0.0, start + number / options.rate - time.monotonic()))
        for message in messages:
            # One request is one partition's, so that its messages stay together.
            key = str(message["request"])
            producer.produce(options.topic, key=key, value=json.dumps(message))
        producer.poll(0)
    producer.flush()


if __name__ == "__main__":
    main()
