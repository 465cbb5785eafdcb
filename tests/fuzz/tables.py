"""A tiny table, its registry, and results of commands next to those of plain Python."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.fuzz.cases import Case, Done, recd, wrong

Row = Mapping[str, Any]

ROWS, STEPS, BATCH = 48, 3, 8
#: Every id of the rows below is smaller.
NUM_IDS = 40
READ = STEPS * BATCH
LISTS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        ("session_id", pa.int64()),
        ("ts", pa.int64()),
        ("label", pa.int8()),
        ("price", pa.float32()),
        ("user", LISTS),
        ("items", LISTS),
    ]
)
FILES = ("table/a.parquet", "table/b.parquet")


def rows(count: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    """Sessions of four rows in the order of time, with lists that repeat within them."""
    return [
        {
            "session_id": seed * 1000 + number // 4,
            "ts": 100 + number,
            "label": int(number % 3 == 0),
            "price": (number * 7 % 16) / 16,
            "user": [number // 4 % NUM_IDS],
            "items": [(number // 2 * 5 + item) % NUM_IDS for item in range(number // 2 % 4)],
        }
        for number in range(count)
    ]


def table(given: Iterable[Row] | None = None) -> pa.Table:
    return pa.Table.from_pylist(rows() if given is None else list(given), SCHEMA)


def with_column(data: pa.Table, name: str, column: Any) -> pa.Table:
    return data.set_column(data.column_names.index(name), name, column)


def write(path: str | Path, data: pa.Table, **options: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    defaults = {"row_group_size": 12, "write_page_checksum": True, "store_schema": False}
    pq.write_table(data, path, **{**defaults, **options})


def write_two() -> None:
    whole = table()
    write("table/a.parquet", whole.slice(0, ROWS // 2))
    write("table/b.parquet", whole.slice(ROWS // 2))


def registry(path: str = "table", *, where: object = (), buckets: int | None = NUM_IDS) -> str:
    """A registry that trains on a table in some steps, ids hashed into ``buckets``."""
    options = {"path": path, "prefetch": 0, **({"where": where} if where else {})}
    hashed = "{use: recd.sigrid_hash, features: ['*'], options: {buckets: %s}}"
    hashing = "" if buckets is None else f"preprocessing:\n  - {hashed % buckets}\n"
    mlps = "bottom_mlp: [4], top_mlp: [4]"
    return (
        "version: 1\n"
        f"dataset: {{use: recd.session_parquet, options: {json.dumps(options)}}}\n"
        f"converter: {{use: recd.ikjt}}\n{hashing}"
        f"model: {{embedding_dim: 4, num_embeddings: {NUM_IDS}, {mlps}}}\n"
        f"training: {{batch_size: {BATCH}, steps: {STEPS}, learning_rate: 0.5, device: cpu}}\n"
    )


def write_registry(text: str | None = None, **options: Any) -> None:
    Path("registry.yaml").write_text(text or registry(**options), encoding="utf-8")


def losses(registry_file: str = "registry.yaml", *options: object) -> list[float] | Done:
    done = recd("run", registry_file, "--json", "figures.json", *options)
    return figures() if done.ok else done


def figures() -> list[float]:
    found: list[float | None] = json.loads(Path("figures.json").read_text("utf-8"))["losses"]
    finite = [loss for loss in found if loss is not None and math.isfinite(loss)]
    if len(finite) < len(found):
        wrong(f"losses {found}")
    return finite


@cache
def _losses_of(text: str) -> tuple[float, ...]:
    write("meant/all.parquet", pa.Table.from_pylist(json.loads(text), SCHEMA))
    Path("meant.yaml").write_text(registry("meant"), encoding="utf-8")
    found = losses("meant.yaml")
    assert isinstance(found, list), found
    return tuple(found)


def losses_of(given: Iterable[Row]) -> list[float]:
    return list(_losses_of(json.dumps([plain(row) for row in given])))


def plain(row: Row) -> dict[str, Any]:
    return {
        "session_id": 0,
        "ts": 0,
        "label": _number(row["label"], int),
        "price": _number(row["price"], float),
        **{name: _ids(row[name]) for name in ("user", "items")},
    }


def _number(value: Any, kind: type) -> Any:
    if not isinstance(value, (int, float)) or kind(value) != value:
        raise TypeError(value)
    return kind(value)


def _ids(value: Any) -> list[int]:
    if isinstance(value, bytes):
        parts = (value[at : at + 8] for at in range(0, len(value), 8))
        return [int.from_bytes(part, "little", signed=True) for part in parts]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise TypeError(value)
    return list(value)


def files_of(folder: str | Path) -> list[Path]:
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    return [
        path
        for path in sorted(folder.rglob("*.parquet"))
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    ]


def rows_in(folder: str | Path) -> list[dict[str, Any]]:
    return [row for path in files_of(folder) for row in pq.ParquetFile(path).read().to_pylist()]


def texts(given: Iterable[Row]) -> list[str]:
    def normal(name: str, value: Any) -> Any:
        return _ids(value) if name in ("user", "items") and isinstance(value, bytes) else value

    return [repr(sorted((name, normal(name, each)) for name, each in row.items())) for row in given]


def counted(given: Iterable[Row]) -> Counter[str]:
    return Counter(texts(given))


def check_rows(folder: str, meant: Iterable[Row] | None = None) -> None:
    expected, got = counted(rows() if meant is None else meant), counted(rows_in(folder))
    if got != expected:
        wrong(f"{folder}: {(expected - got)} missing, {(got - expected)} too many")


def trained(meant: Sequence[Row] | None) -> None:
    """Train on ``table``: refused, or the losses are those of the rows that are meant."""
    write_registry()
    found = losses()
    if isinstance(found, Done):
        found.refused("table")
        return
    if meant is None:
        wrong(f"trained to {found}, which it should refuse")
    try:
        expected = losses_of(meant)
    except (KeyError, TypeError) as error:
        wrong(f"trained to {found} on rows that cannot be trained on: {error}")
    if found != expected:
        wrong(f"losses {found}, not {expected}")


def _written(meant: Sequence[Row] | None, done: Done, new: str) -> None:
    if not done.ok:
        done.refused("table")
    elif meant is None:
        wrong(f"{done} succeeded on what it should refuse")
    else:
        check_rows(new, meant)


def clustered(meant: Sequence[Row] | None) -> None:
    done = recd("cluster", "table", "clustered")
    _written(meant, done, "clustered")
    if done.ok:
        keys = [(row["session_id"], row["ts"]) for row in rows_in("clustered")]
        sessions = [key[0] for at, key in enumerate(keys) if not at or keys[at - 1][0] != key[0]]
        if len(set(sessions)) != len(sessions):
            wrong(f"{done}: rows of a session lie apart")
        if any(one[0] == two[0] and one[1] > two[1] for one, two in pairwise(keys)):
            wrong(f"{done}: a session is not in the order of time")


def converted(meant: Sequence[Row] | None) -> None:
    done = recd("convert-layout", "table", "converted", "--layout", "list_dict")
    _written(meant, done, "converted")
    if done.ok and texts(rows_in("converted")) != texts(meant or ()):
        wrong(f"{done}: rows in another order")


def logged(meant: Sequence[Row] | None) -> None:
    """Write ``table`` to a log and read it: refused, or the rows are those that are meant."""
    done = recd("logs", "write", "table", "log", "--shards", 2)
    if done.ok and not (back := recd("logs", "read", "log", "back.parquet")).ok:
        wrong(f"what {done} wrote is refused: {back.output}")
    _written(meant, done, "back.parquet")


#: What is done with a table that should be taken or refused by all of these alike.
USES = {"run": trained, "cluster": clustered, "convert": converted, "log": logged}


def use(case: Case, meant: Iterable[Row] | None, *names: str) -> None:
    """Try one of ``USES``, of ``names`` where they are given; None means that it is refused."""
    kept = None if meant is None else list(meant)
    USES[case.one_of(names or list(USES), "use")](kept)
