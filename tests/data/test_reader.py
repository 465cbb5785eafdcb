"""PlannedReader refuses by name what is no way to read pieces."""

from __future__ import annotations

import pyarrow as pa
import pytest

from recd_plugins.api import Origin, Rows
from recd_plugins.api.reading import PlannedReader, ReadPlan, Unit

BATCH = pa.record_batch({"user": pa.array(range(8), pa.int64())})


def returns_none(pieces):
    list(pieces)


def returns_a_list(pieces):
    return [Rows(BATCH, (Origin("f", 0, 8),)) for _ in pieces]


def yields_batches(pieces):
    for _ in pieces:
        yield BATCH


def yields_too_few(pieces):
    next(pieces)
    yield Rows(BATCH.slice(0, 3), (Origin("f", 0, 3),))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("read", "kind", "expected"),
    [
        (returns_none, TypeError, "returns_none returned NoneType; it is a generator function"),
        (returns_a_list, TypeError, "returns_a_list returned list; it is a generator function"),
        (yields_batches, TypeError, "yields_batches yielded RecordBatch, not Rows"),
        (yields_too_few, ValueError, "yields_too_few yielded 3 rows of pieces with 16"),
    ],
)
def test_a_wrong_callable_is_named(read, kind, expected, ahead):
    plan = ReadPlan((Unit(0, 0, 0, 8), Unit(0, 1, 8, 8)), batch_size=4)
    reader = PlannedReader(plan, read, data={}, what="f.arrow", rank=0, world_size=1, ahead=ahead)
    with pytest.raises(kind, match=f"^reading f.arrow: {expected}"):
        list(reader)
