"""An S3-compatible store on loopback, in a process of its own, which notes every answer.

moto's server behind a WSGI application that adds a set time to each GET, as a store over a network
takes before its first byte, and lists requests at ``/-/requests``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.request import urlopen

_REQUESTS = "/-/requests"


@dataclass(frozen=True)
class Request:
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Store:
    endpoint: str

    def taken(self) -> list[Request]:
        with urlopen(self.endpoint + _REQUESTS) as answer:
            return [Request(**each) for each in json.load(answer)]

    def upload(self, folder: Path, bucket: str) -> None:
        import pyarrow.fs as pafs

        scheme, _, host = self.endpoint.partition("://")
        store = pafs.S3FileSystem(
            scheme=scheme, endpoint_override=host, region="us-east-1", allow_bucket_creation=True
        )
        store.create_dir(bucket)
        pafs.copy_files(str(folder), bucket, destination_filesystem=store)


@contextmanager
def counted_store() -> Iterator[Store]:
    """Start a store. Its readers need credentials in their environment, such as any text."""
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise RuntimeError("the store did not start; is moto[server] installed?")
            yield Store(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


class _Counted:
    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self._inner = inner
        self._requests: list[Request] = []
        self._lock = Lock()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == _REQUESTS:
            with self._lock:
                found, self._requests = self._requests, []
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps([asdict(each) for each in found]).encode()]
        wanted = environment.get("HTTP_RANGE", "")
        body = b"".join(self._inner(environment, start))
        if environment["REQUEST_METHOD"] == "GET" and wanted:
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            with self._lock:
                self._requests.append(Request(path.lstrip("/"), first, first + len(body)))
        return [body]


def _serve() -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _Counted(inner), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
