"""LiveModel: applies versions completely and in order, whatever happens to their files."""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.forked import Program
from torch import Tensor, nn

from recd_plugin_runs.row_files import dense_file, digest
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.files import write_json, write_note
from recd_plugins.serving import LiveModel

ROWS, DIM, CAPACITY = 40, 3, 12


class Toy(nn.Module):
    ids: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.found = nn.Embedding(ROWS, DIM), nn.Embedding(CAPACITY + 1, DIM)
        self.bias = nn.Parameter(torch.zeros(DIM))
        for name in ("ids", "rows"):
            values = torch.zeros(CAPACITY, dtype=torch.int64)
            self.register_buffer(name, values, persistent=False)

    def forward(self, plain: Tensor, ids: Tensor) -> Tensor:
        place = torch.searchsorted(self.ids, ids).clamp(max=CAPACITY - 1)
        own = torch.where(self.ids[place] == ids, self.rows[place], 0)
        return torch.stack(
            [self.plain(plain), self.found(own), self.bias.expand(plain.shape[0], -1)]
        )


INDEX = {"ids": "ids", "rows": "rows", "size": CAPACITY}
LAYOUT = {
    "tables": {
        "plain": {"weights": "plain.weight", "index": None},
        "found": {"weights": "found.weight", "index": INDEX},
    },
    "dense": {"bias": "bias"},
}


@cache
def exported() -> bytes:
    inputs, sizes = (torch.arange(5), torch.arange(5)), {0: torch.export.Dim("rows")}
    program = torch.export.export(Toy(), inputs, dynamic_shapes=(sizes, sizes), strict=False)
    torch.export.save(program, file := io.BytesIO())
    return file.getvalue()


class Published:
    def __init__(self, folder: Path) -> None:
        self.folder, self.draw = folder, np.random.default_rng(0)
        self.program = folder / "program-00000001"
        self.program.mkdir(parents=True)
        (self.program / "model.pt2").write_bytes(exported())
        files = {"model.pt2": digest(self.program / "model.pt2")}
        write_json(self.program / "program.json", {**LAYOUT, "files": files})
        self.sequence, self.previous = 0, ""
        self.plain = np.ones((ROWS, DIM), np.float32)
        self.ids = np.full(CAPACITY, -1)
        self.values = np.zeros((CAPACITY, DIM), np.float32)
        self.deltas: list[dict[str, Any]] = []
        self.write("base", np.arange(ROWS), np.arange(0), np.full(CAPACITY, -1))

    def step(self, rows: int = 9, kind: str = "delta") -> None:
        """Publish new weights of some rows, and give some positions to other ids."""
        changed = self.draw.choice(ROWS, rows, replace=False)
        places = self.draw.choice(CAPACITY, 4, replace=False)
        before = self.ids.copy()
        free = np.setdiff1d(np.arange(50), self.ids)
        self.ids[places[1:]] = self.draw.choice(np.append(free, [-1, -1]), 3, replace=False)
        self.ids[places[0]], self.ids[places[1]] = self.ids[places[1]], before[places[0]]
        self.plain[changed] = self.values[places] = self.sequence + 1
        if kind == "base":
            changed, places = np.arange(ROWS), np.flatnonzero(self.ids >= 0)
            before = self.ids
        self.write(kind, changed, places, before)

    def write(self, kind: str, rows: Any, places: Any, before: Any) -> None:
        self.sequence += 1
        folder = self.folder / f"{kind}-{self.sequence:08d}"
        folder.mkdir()
        removed = np.where(before == self.ids, -1, before)[places]
        columns = {"id": self.ids[places], "removed": removed}
        of_tables = {
            "plain": (rows, {}, self.plain[rows]),
            "found": (places + 1, columns, self.values[places]),
        }
        tables: dict[str, Any] = {}
        for name, (own, more, weights) in of_tables.items():
            lists = pa.FixedSizeListArray.from_arrays(pa.array(weights.ravel()), DIM)
            pq.write_table(pa.table({"row": own, **more, "weights": lists}), folder / name)
            sha256 = digest(folder / name)
            tables[name] = [{"file": name, "column": 0, "sha256": sha256}]
        state = {"bias": torch.full((DIM,), float(self.sequence))}
        manifest = {
            "sequence": self.sequence,
            "step": 10 * self.sequence,
            "time": 0.0,
            "delta": None,
            "previous": self.previous if kind == "delta" else None,
            "tables": tables,
            "dense": dense_file(folder / "dense.npz", state, iter(state)),
        }
        write_json(folder / "manifest.json", manifest)
        self.previous = digest(folder / "manifest.json")
        entry = {"sequence": self.sequence, "folder": folder.name, "sha256": self.previous}
        if kind == "base":
            self.base, self.deltas = entry, []
        else:
            self.deltas.append(entry)
        self.point()

    def point(self, **other: Any) -> None:
        program = {"folder": self.program.name, "sha256": digest(self.program / "program.json")}
        current = {"program": program, "base": self.base, "deltas": self.deltas, **other}
        write_note(self.folder / "current.json", current)

    def check(self, live: LiveModel) -> None:
        """Compare all rows and ids to the newest version."""
        rows, ids = torch.arange(50) % ROWS, torch.arange(50)
        found = live(rows, ids).numpy()
        assert np.array_equal(found[0], self.plain[rows])
        place = {each: n for n, each in enumerate(self.ids.tolist())}
        expected = [self.values[place[n]] if n in place else np.zeros(DIM) for n in range(50)]
        assert np.array_equal(found[1], expected)
        assert (found[2] == self.sequence).all()
        with live.version() as version:
            assert (version.sequence, version.step) == (self.sequence, 10 * self.sequence)


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "live")


def test_versions_in_order(published: Published) -> None:
    live = LiveModel(published.folder)
    published.check(live)
    for number in range(16):
        published.step(kind="base" if number == 13 else "delta")
        if number % 7 == 6:
            continue  # the next update applies two deltas
        assert live.update() in (1, 2)
        published.check(live)
        assert live.update() == 0
    published.check(LiveModel(published.folder))
    assert live.freshness > 1e9
    # A new run publishes another program, and starts its numbers again.
    shutil.rmtree(published.folder)
    exported.cache_clear()
    again = Published(published.folder)
    live.update()
    again.check(live)


def test_what_cannot_be_applied_changes_nothing(published: Published) -> None:
    live = LiveModel(published.folder)
    published.step()
    live.update()
    served = live(torch.arange(ROWS), torch.arange(ROWS))

    def refused(why: str) -> None:
        with pytest.raises(DataError, match=why):
            live.update()
        assert torch.equal(live(torch.arange(ROWS), torch.arange(ROWS)), served)

    known = [*published.deltas]
    for _ in range(2):
        published.step()
    first, second = published.deltas[1:]
    published.point(deltas=[*known, second])
    refused("follows version 3, but version 2 is served")
    published.point(deltas=[*known, second, first])
    refused("follows version 3")
    published.point(deltas=[*known, {**second, "sequence": 3}])
    refused("does not continue the served version 2")
    published.point(deltas=[])
    refused("lists version 1, but version 2 is already served")
    published.point(deltas=[{**known[0], "sha256": "0" * 64}, first])
    refused("was replaced after it was served")
    published.point()
    for file in sorted((published.folder / first["folder"]).iterdir()):
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            refused(f"{file.name}: the file is damaged")
        file.unlink()
        refused("cannot be read")
        file.write_bytes(content)
    current = published.folder / "current.json"
    content = current.read_bytes()
    current.write_bytes(content[:-9])
    refused("current.json: the file is damaged")
    current.write_bytes(content)
    assert live.update() == 2
    published.check(live)
    # A newer base continues after a delta that is gone.
    published.step()
    shutil.rmtree(published.folder / published.deltas[-1]["folder"])
    published.step(kind="base")
    published.step()
    assert live.update() == 3
    published.check(live)


def test_requests_see_one_version(published: Published) -> None:
    live, stop, torn = LiveModel(published.folder), threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            found = live(torch.arange(ROWS), torch.arange(ROWS))
            version = found[2, 0, 0]
            torn.extend([] if (found[0] == version).all() else [found])

    live.follow(0.01)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        published.step(rows=ROWS)
    while live._version.sequence < published.sequence and not live.problem:
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    live.close()
    assert not torn
    assert not live.problem
    published.check(live)


KILLED = """
import sys, time
others = ("torchrec", "fbgemm_gpu", "numba", "pydantic")
for name in [name for name in sys.modules if name.startswith(("recd_plugins", *others))]:
    del sys.modules[name]
from recd_plugins.serving import LiveModel, LiveVersion

live = LiveModel(sys.argv[1])
assert not set(others).intersection(sys.modules)
read = LiveVersion.read

def slow(version, *arguments):
    def wait():
        print("applying", flush=True)
        time.sleep(60)
    return [*read(version, *arguments)[:2], wait]

LiveVersion.read = slow
print("serving", flush=True)
while not live.update():
    time.sleep(0.01)
"""


def test_a_server_killed_while_it_applies(published: Published) -> None:
    program = Program([sys.executable, "-c", KILLED, published.folder])
    assert program.first_line() == "serving\n"
    published.step()
    files = {path: path.read_bytes() for path in published.folder.rglob("*.*")}
    while "applying" not in program.output()[0]:
        assert program.poll() is None, program.output()[1]
        time.sleep(0.01)
    program.kill_all()
    assert files == {path: path.read_bytes() for path in published.folder.rglob("*.*")}
    published.check(LiveModel(published.folder))
