"""File locations, which are local paths or URLs of object stores and other file systems."""

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

from recd_plugins.interfaces.rows import Storage
from recd_plugins.runtime.errors import DataError, SetupError

_URL = r"^[A-Za-z][A-Za-z0-9+.\-]*://"
#: Pattern of a URL in options; other text is a path.
Url = Annotated[str, Field(pattern=_URL)]

_BUCKETS = ("s3", "gs", "gcs")
_OF_STORE = re.compile("AWS Error|google::cloud|when reading information for key")
# Folders of table formats. Their data files may contain deleted rows.
_MARKS = {"_delta_log": "Delta", ".hoodie": "Hudi"}


@dataclass(frozen=True)
class Location:
    """Path or URL of a file or folder, with properties that identify a file's content.

    Attributes:
        path: local path or URL, as the user wrote it.
        size, changed: bytes and modification time in nanoseconds of a file that ``find`` returned.
        seen: pairs (name, value), such as the ETag, that identify the content of an opened file.
    """

    path: Path | str
    storage: Storage = field(default_factory=Storage)
    size: int | None = field(default=None, compare=False)
    changed: int | None = field(default=None, compare=False)
    seen: tuple[tuple[str, str | int], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """Return the path or URL, without passwords and query, for error messages."""
        if self.local:
            return str(self.path)
        scheme, _, rest = str(self.path).partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"

    @property
    def local(self) -> Path | None:
        """Return the local path, or None for a URL."""
        return self.path if isinstance(self.path, Path) else None

    def find(self, suffix: str, *, may_be_empty: bool = False) -> list[Location]:
        """Return this file, or every file below this folder whose name ends with ``suffix``.

        Files are sorted by the parts of their paths. Names that start with ``_`` or ``.`` are
        skipped.

        Raises:
            DataError: no file is found, unless the folder ``may_be_empty``. Or the folder is a
                Delta, Iceberg or Hudi table.
            SetupError: the store cannot be reached, or denies access.
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
        except FileNotFoundError as error:
            raise DataError(
                f"{self}: no such file or folder (current directory: {Path.cwd()}). Correct the "
                "path"
            ) from error
        except (OSError, pa.ArrowException, UnicodeError) as error:
            raise DataError(f"{self}: cannot list the folder: {error}. Check access") from error
        root = path.rstrip("/")
        for info in infos:
            below = info.path.removeprefix(root).lstrip("/")
            parts = below.split("/")
            _refuse_table(str(self), parts)
            hidden = any(part.startswith((".", "_")) for part in parts)
            if info.type == pafs.FileType.File and below.endswith(suffix) and not hidden:
                inner = (
                    self.local / below if self.local else f"{str(self.path).rstrip('/')}/{below}"
                )
                found.append((parts, self._found(info, inner)))
        if not found and not may_be_empty:
            raise DataError(f"{self}: no {suffix or 'data'} file in this folder. Use another path")
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def below(self, root: Location) -> str:
        """Return this file's path relative to ``root``, or its name if this file is ``root``."""
        mine = str(self.path) if self.local is None else self.local.as_posix()
        top = str(root.path) if root.local is None else root.local.as_posix()
        top = top.rstrip("/")
        if mine == top:
            return mine.rpartition("/")[2]
        return mine.removeprefix("" if top == "." else f"{top}/")

    def open(self) -> pa.NativeFile:
        """Open the file for random access."""
        with self.told():
            if self.local is not None:
                return pa.OSFile(str(self.local))
            files, path = self.file_system()
            return files.open_input_file(path)

    def state_of(self, source: pa.NativeFile) -> tuple[tuple[str, str | int], ...]:
        """Return pairs such as ("size", bytes) that change if the file is replaced."""
        if self.local is not None:
            found = os.fstat(source.fileno())
            return (
                ("size", found.st_size),
                ("time of change", found.st_mtime_ns),
                ("inode", found.st_ino),
            )
        size = source.size()
        if (tag := source.metadata().get("ETag")) is not None:
            return (("size", size), ("ETag", tag.decode(errors="replace")))
        files, path = self.file_system()
        return (("size", size), ("time of change", files.get_file_info(path).mtime_ns or 0))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Convert exceptions of an object store in the context to DataError or SetupError."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if self.local is not None:
                raise
            text = " ".join(str(error).split())
            where = f" at {self.storage.endpoint}" if self.storage.endpoint else ""
            if isinstance(error, FileNotFoundError) or "NO_SUCH_BUCKET" in text:
                raise DataError(
                    f"{self}: no such file, folder or bucket{where}. Check the URL"
                ) from error
            known = isinstance(error, PermissionError | TimeoutError | ConnectionError)
            if not known and not _OF_STORE.search(text):
                raise
            raise SetupError(
                f"{self}: the object store cannot be read{where}: {text.rstrip('.')}. Check the "
                "network, storage.endpoint, storage.region and the credentials (AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage: {anonymous: true})"
            ) from error

    def file_system(self) -> tuple[pafs.FileSystem, str]:
        """Return the pyarrow file system and the path in this file system."""
        if self.local is not None:
            return pafs.LocalFileSystem(), os.path.abspath(self.local)
        url, given = str(self.path), self.storage
        parts = urlsplit(url)
        path = url.partition("://")[2]
        if "@" in parts.netloc:
            raise SetupError(
                f"{self}: the URL contains a user or password. Set credentials in environment "
                "variables instead"
            )
        scheme, _, host = (given.endpoint or "").rstrip("/").rpartition("://")
        if parts.scheme in _BUCKETS:
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
        if parts.scheme == "file":
            return pafs.LocalFileSystem(), parts.path
        try:
            from fsspec.core import url_to_fs

            files, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SetupError(
                f"{self}: the URL cannot be opened: {error}. Use a path, s3:// or gs://. For "
                'other URLs, run pip install "recd-plugins[fsspec]" and install the fsspec '
                "package of the scheme"
            ) from error
        return pafs.PyFileSystem(pafs.FSSpecHandler(files)), path

    def _found(self, info: pafs.FileInfo, path: Path | str) -> Location:
        return Location(path, self.storage, info.size, info.mtime_ns)


def _refuse_table(root: str, below: Sequence[str]) -> None:
    """Raise DataError if a folder contains a Delta, Iceberg or Hudi table."""
    for at, part in enumerate(below):
        snapshot = part == "metadata" and below[-1].endswith(".metadata.json")
        kind = _MARKS.get(part) or ("Iceberg" if snapshot and at == len(below) - 2 else None)
        if kind is not None:
            raise DataError(
                f"{'/'.join([root.rstrip('/'), *below[:at]])}: the format is {kind}, whose files "
                "may contain deleted rows. Import Delta and Iceberg tables with recd init, or "
                "write Parquet"
            )
