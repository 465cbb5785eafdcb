"""Local files as fsspec has them, under ``counted://``, which note every read."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from tests.data.storage.counted_store import Request


class CountedFiles(LocalFileSystem):  # type: ignore[misc,unused-ignore]
    """The file system; ``requests`` are those of the process."""

    protocol = ("counted",)
    requests: ClassVar[list[Request]] = []

    @classmethod
    def taken(cls) -> list[Request]:
        """What was read since the last call."""
        found, cls.requests[:] = list(cls.requests), []
        return found

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        assert mode == "rb", "tables are only read"
        return _CountedFile(path)


class _CountedFile(io.FileIO):
    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        self._path = path

    def read(self, size: int | None = -1) -> bytes:
        start = self.tell()
        found = super().read(-1 if size is None else size) or b""
        CountedFiles.requests.append(Request(self._path, start, start + len(found)))
        return found


def register() -> None:
    """Make ``counted://`` known to fsspec."""
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
