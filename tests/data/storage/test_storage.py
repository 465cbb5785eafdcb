"""Locations: what is found where, and what is said where nothing is, or nobody may look."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.storage.counted_store import Store

from recd_plugins.data.parquet import ParquetTable
from recd_plugins.interfaces.rows import Storage
from recd_plugins.runtime.errors import DataError, SetupError


def at(endpoint: str, **options: Any) -> Storage:
    return Storage(endpoint=endpoint, region="us-east-1", attempts=1, **options)


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[bool]]]:
    """Yield the endpoint of a store that refuses, and whether its requests were signed."""
    signed: list[bool] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            signed.append("Authorization" in self.headers)
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", signed
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://nowhere", r"s3://nowhere: no such file"),
        ("s3://tables/klicks", "s3://tables/klicks: no such file"),
        ("s3://tables/clicks/day=01/.part.parquet/x", "no such file"),
    ],
)
def test_what_is_missing_is_named(store: Store, url: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ParquetTable(url, at(store.endpoint))


def test_a_store_that_refuses_says_what_to_set(refusing):
    endpoint, signed = refusing
    with pytest.raises(SetupError) as error:
        ParquetTable("s3://tables/clicks", at(endpoint))
    for word in ("s3://tables/clicks", endpoint, "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "anonymous"):
        assert word in str(error.value)
    assert set(signed) == {True}
    signed.clear()
    with pytest.raises(SetupError, match="cannot be read at"):
        ParquetTable("s3://tables/clicks", at(endpoint, anonymous=True))
    assert set(signed) == {False}


def test_nobody_at_the_endpoint_and_one_who_never_answers_end_soon():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ports = 1, silent.getsockname()[1]
        for port in ports:
            storage = at(f"http://127.0.0.1:{port}", connect_timeout=1, request_timeout=1)
            start = time.monotonic()
            with pytest.raises(SetupError, match=f"cannot be read at http://127.0.0.1:{port}"):
                ParquetTable("s3://tables/clicks", storage)
            assert time.monotonic() - start < 30


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(SetupError, match="s3://tables/t: the URL contains a user or password"):
        ParquetTable("s3://key:word@tables/t")


def test_a_scheme_that_nobody_knows_and_one_without_its_package(monkeypatch):
    with pytest.raises(SetupError, match=r"cloud://x/y: .*cloud.*\. Use a path, s3://"):
        ParquetTable("cloud://x/y")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SetupError, match=r'pip install "recd-plugins\[fsspec\]"'):
        ParquetTable("memory://x")


MARKS = {
    "_delta_log/00000000000000000000.json": "Delta",
    ".hoodie/hoodie.properties": "Hudi",
    "metadata/00000-a.metadata.json": "Iceberg",
}


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_table_of_another_library_is_refused(tmp_path: Path, scheme: str, mark: str) -> None:
    store = fsspec.filesystem("memory" if scheme else "file")
    top = f"/folders/{mark.partition('/')[0]}" if scheme else str(tmp_path)
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), file)
    store.makedirs(f"{top}/table/day=1/hour=2")
    store.pipe(f"{top}/table/day=1/hour=2/x.parquet", file.getvalue().to_pybytes())
    below = [f"{top}{part}" for part in ("", "/table", "/table/day=1/hour=2")]
    places = [f"memory:/{part}" if scheme else Path(part) for part in below]
    for place in places:
        assert ParquetTable(place).units
    store.makedirs(f"{top}/table/{mark.rpartition('/')[0]}", exist_ok=True)
    store.pipe(f"{top}/table/{mark}", b"{}")
    for place in places[:2]:
        with pytest.raises(DataError, match=rf"table: the format is {MARKS[mark]}, whose files"):
            ParquetTable(place)
