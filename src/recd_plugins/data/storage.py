"""Locations of files: a local path, or a URL of an object store or another file system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import Field

from recd_plugins.errors import DataError, SetupError
from recd_plugins.values.rows import Storage

_URL = r"^[A-Za-z][A-Za-z0-9+.\-]*://"
#: A URL as an option takes it. What does not look like one is a path.
Url = Annotated[str, Field(pattern=_URL)]

#: The name of the modification time in what identifies a file.
CHANGED = "time of change"

_BUCKETS = ("s3", "gs", "gcs")
_OF_STORE = re.compile("AWS Error|google::cloud|when reading information for key")
_NO_FILE = (
    "no file, but a link to nowhere, a pipe or a device; remove it, or start its name with _ to "
    "leave it out"
)
# Folders of table formats whose data files may hold rows that were deleted since.
_MARKS = {"_delta_log": "Delta", ".hoodie": "Hudi"}


@dataclass(frozen=True)
class Location:
    """A file or a folder.

    Attributes:
        path: a local path, or a URL, as the user wrote it.
        storage: how the store of a URL is reached.
        size: bytes of a file that ``find`` found.
        changed: its modification time in nanoseconds, where the file system has one.
        seen: what identifies the file's content, by name; empty before it was opened.
    """

    path: Path | str
    storage: Storage = field(default_factory=Storage)
    size: int | None = field(default=None, compare=False)
    changed: int | None = field(default=None, compare=False)
    seen: tuple[tuple[str, str | int], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """Return the path or URL without secrets, for messages."""
        return str(self.path) if self.local else _shown(str(self.path))

    @property
    def local(self) -> Path | None:
        """The path, None for a URL."""
        return self.path if isinstance(self.path, Path) else None

    def find(self, suffix: str) -> list[Location]:
        """Return this file, or every file below this folder whose name ends with ``suffix``.

        Sorted by the parts of their paths. Names that start with ``_`` or ``.`` are left out.

        Raises:
            DataError: there is no such place, or no such file in it; or it is a table of Delta,
                Iceberg or Hudi.
            SetupError: the store cannot be reached, or refuses.
        """
        found = []
        try:
            with self.told():
                files, path = self.file_system()
                info = files.get_file_info(path)
                if info.type == pafs.FileType.File:
                    return [self._found(info, self.path)]
                if info.type != pafs.FileType.Directory:
                    raise FileNotFoundError(path)
                infos = files.get_file_info(pafs.FileSelector(path, recursive=True))
                self._refuse_partition(files, path)
        except FileNotFoundError as error:
            relative = self.local and not self.local.is_absolute()
            where = f"; it is looked for in {Path.cwd()}" if relative else ""
            raise DataError(f"{self}: no such file or folder{where}") from error
        except (OSError, pa.ArrowException, UnicodeError) as error:
            raise DataError(f"{self}: cannot be listed: {error}") from error
        root = path.rstrip("/")
        for info in infos:
            below = info.path.removeprefix(root).lstrip("/")
            parts = below.split("/")
            _refuse_table(str(self), parts)
            if info.type == pafs.FileType.Directory or not below.endswith(suffix):
                continue
            if any(part.startswith((".", "_")) for part in parts):
                continue
            inner = self.local / below if self.local else f"{str(self.path).rstrip('/')}/{below}"
            if info.type != pafs.FileType.File:
                raise DataError(f"{inner}: {_NO_FILE}")
            found.append((parts, self._found(info, inner)))
        for link in self.local.rglob(f"*{suffix}") if self.local else ():
            if not link.exists() and not link.name.startswith(("_", ".")):  # Arrow skips it
                raise DataError(f"{link}: {_NO_FILE}")
        if not found:
            raise DataError(f"{self}: no *{suffix} file in this folder")
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def below(self, root: Location) -> str:
        """Return the path of this file below ``root``, with slashes; its name if it is ``root``."""
        mine = str(self.path) if self.local is None else self.local.as_posix()
        top = str(root.path) if root.local is None else root.local.as_posix()
        top = top.rstrip("/")
        if mine == top:
            return mine.rpartition("/")[2]
        return mine.removeprefix("" if top == "." else f"{top}/")

    def open(self) -> pa.NativeFile:
        """Open the file for random access.

        Raises:
            RecdError: it is not there, or the store refuses.
            OSError: a local file cannot be opened.
        """
        with self.told():
            if self.local is not None:
                return pa.OSFile(str(self.local))
            files, path = self.file_system()
            return files.open_input_file(path)

    def state_of(self, source: pa.NativeFile) -> tuple[tuple[str, str | int], ...]:
        """Return what tells this open file from another one in its place."""
        if self.local is not None:
            found = os.fstat(source.fileno())
            return (("size", found.st_size), (CHANGED, found.st_mtime_ns), ("inode", found.st_ino))
        size = source.size()
        if (tag := source.metadata().get("ETag")) is not None:
            return (("size", size), ("ETag", tag.decode(errors="replace")))
        files, path = self.file_system()
        return (("size", size), (CHANGED, files.get_file_info(path).mtime_ns or 0))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn errors of a store into ones that say what to do; other errors pass.

        Raises:
            DataError: there is no such file, folder or bucket.
            SetupError: the store cannot be reached, or refuses.
        """
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if self.local is not None:
                raise
            text = " ".join(str(error).split())
            where = f" at {self.storage.endpoint}" if self.storage.endpoint else ""
            if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in text:
                raise DataError(f"{self}: no such file, folder or bucket{where}") from error
            known = isinstance(error, PermissionError | TimeoutError | ConnectionError)
            if not known and not _OF_STORE.search(text):
                raise
            raise SetupError(
                f"{self}: the store cannot be read{where}: {text}; check the network, "
                "storage.endpoint and storage.region, and the credentials (for s3:// "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for public data "
                "storage: {anonymous: true})"
            ) from error

    def file_system(self) -> tuple[pafs.FileSystem, str]:
        """Return the file system, and the path in it.

        Raises:
            DataError: the URL names no bucket.
            SetupError: the URL holds credentials, nobody knows its scheme, or an option of
                ``storage`` does not apply to it.
        """
        if self.local is not None:
            return pafs.LocalFileSystem(), os.path.abspath(self.local)
        url, given = str(self.path), self.storage
        parts = urlsplit(url)
        path = url.partition("://")[2]
        if _names_somebody(url):
            raise SetupError(
                f"the location {self} holds a user or a password; leave them out, credentials "
                "come from the environment"
            )
        scheme, _, host = (given.endpoint or "").partition("://")
        if parts.scheme in _BUCKETS:
            if not parts.netloc:
                raise DataError(f"{self}: names no bucket; write {parts.scheme}://bucket/folder")
            if parts.scheme == "s3":
                return pafs.S3FileSystem(
                    anonymous=given.anonymous,
                    region=given.region,
                    scheme=scheme or "https",
                    endpoint_override=host or None,
                    connect_timeout=given.connect_timeout,
                    request_timeout=given.request_timeout,
                    retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=given.attempts),
                ), path
            return pafs.GcsFileSystem(
                anonymous=given.anonymous,
                scheme=scheme or "https",
                endpoint_override=host or None,
                retry_time_limit=timedelta(seconds=given.request_timeout * given.attempts),
            ), path
        for name in ("anonymous", "endpoint", "region"):
            if getattr(given, name):
                raise SetupError(
                    f"{self}: storage.{name} is for s3:// and gs://; leave it out, "
                    f"{parts.scheme}:// is set up by fsspec's own configuration"
                )
        if parts.scheme == "file":
            return pafs.LocalFileSystem(), parts.path
        try:
            from fsspec.core import url_to_fs

            files, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SetupError(
                f"{self}: {error}; use a path, s3://, gs://, or a file system of fsspec "
                '(pip install "recd-plugins[fsspec]", and its package)'
            ) from error
        return pafs.PyFileSystem(pafs.FSSpecHandler(files)), path

    def _found(self, info: pafs.FileInfo, path: Path | str) -> Location:
        return Location(path, self.storage, info.size, info.mtime_ns)

    def _refuse_partition(self, files: pafs.FileSystem, path: str) -> None:
        """Refuse a folder such as ``day=1`` of a table of another format."""
        folder = path.rstrip("/")
        while "=" in folder.rpartition("/")[2]:
            folder = folder.rpartition("/")[0]
            for mark in _MARKS:
                if files.get_file_info(f"{folder}/{mark}").type != pafs.FileType.NotFound:
                    _refuse_table(folder, [mark])


def _refuse_table(root: str, below: Sequence[str]) -> None:
    """Refuse a file that shows that ``root`` holds a table of another format."""
    for at, part in enumerate(below):
        snapshot = part == "metadata" and below[-1].endswith(".metadata.json")
        kind = _MARKS.get(part) or ("Iceberg" if snapshot and at == len(below) - 2 else None)
        if kind is not None:
            raise DataError(
                f"{'/'.join([root.rstrip('/'), *below[:at]])}: a table of {kind}, whose files may "
                "hold rows that are not in it any more: recd init reads tables of Delta and "
                "Iceberg as they are; else write its rows as Parquet"
            )


def _names_somebody(url: str) -> bool:
    """Whether a URL has a user before its host; a secret may have slashes, a bucket no colon."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    return "@" in host or (scheme in _BUCKETS and ":" in host)


def _shown(url: str) -> str:
    """Return a URL without user, password and signed query."""
    scheme, _, rest = url.partition("://")
    if _names_somebody(url):
        rest = f"...@{rest.rpartition('@')[2]}" if "@" in rest else "..."
    if scheme in ("http", "https") and "?" in rest:
        rest = f"{rest.partition('?')[0]}?..."
    return f"{scheme}://{rest}"
