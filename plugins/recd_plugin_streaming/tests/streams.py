from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recd_plugins.api import Dataset

BATCH = 8
COLUMNS = {"id": "id", "session": "key", "click": "label"}


def clicks(count: int, first: int = 0, sessions: int = 7) -> list[Mapping[str, int]]:
    """``count`` messages with the ids ``first`` and following."""
    ids = range(first, first + count)
    return [{"id": n, "session": n * 31 % sessions, "click": n % 2, "unused": n} for n in ids]


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


def check_resumed(stream: Dataset) -> list[Any]:
    """Read 200 rows, and again from some states. Return the states."""
    batches, states = read(reader(stream))
    assert len(batches) == 25
    assert sorted(flat(batches)) == list(range(200))
    for step in (1, 7, 24):
        rest, _ = read(reader(stream, state=states[step - 1]))
        assert rest == batches[step:], f"after step {step}"
    return states


def check_each_row_once(
    stream: Dataset, steps: Sequence[int], ranks: int, num_rows: int, more: Callable[[], object]
) -> None:
    """Read ``steps`` batches per rank. Write ``more``, and read the other rows by ``ranks``."""
    found, states, left = [], [], 0
    for rank, most in enumerate(steps):
        batches, of_rank = read(reader(stream, rank, len(steps)), most=most)
        found += flat(batches)
        states.append(of_rank[-1])
    state = reader(stream).merge_states(states)
    more()
    for rank in range(ranks):
        made = reader(stream, rank, ranks, state)
        found += flat(read(made)[0])
        left += made.lag()
    assert max(Counter(found).values()) == 1
    assert len(found) + left == num_rows
    assert left < BATCH * ranks
