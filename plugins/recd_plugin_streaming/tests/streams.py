"""Rows of tests, and what readers of streams yield."""

import json
from collections.abc import Mapping
from typing import Any

from recd_plugins.api import Dataset

BATCH = 8
COLUMNS = {"id": "id", "session": "key", "click": "label"}


def clicks(count: int, first: int = 0, sessions: int = 7) -> list[Mapping[str, int]]:
    """``count`` messages with the ids ``first`` and following."""
    return [
        {"id": n, "session": n * 31 % sessions, "click": n % 2, "unused": n}
        for n in range(first, first + count)
    ]


def reader(stream: Dataset, rank: int = 0, world_size: int = 1, state: Any = None) -> Any:
    made = stream.reader(rank=rank, world_size=world_size, batch_size=BATCH, split="train")
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    return made


def read(made: Any, most: int = 1 << 30) -> tuple[list[list[int]], list[Any]]:
    """Return the ids of each batch, and the state after each batch."""
    batches, states = [], []
    for rows in made:
        batches.append(rows.data.column("id").to_pylist())
        states.append(made.state_dict())
        if len(batches) == most:
            break
    made.close()
    return batches, states


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]
