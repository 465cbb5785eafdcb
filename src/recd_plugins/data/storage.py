"""Where files lie: a local path, or a URL of an object store or another file system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import Field

from recd_plugins.data.table_folders import MARKS, refuse_table, tables_above
from recd_plugins.errors import DataError, RecdError, SetupError
from recd_plugins.values.storage import Storage

#: What a file is told from another one in its place by: its time of change, in nanoseconds.
CHANGED = "time of change"

_URL = r"^[A-Za-z][A-Za-z0-9+.\-]*://"
#: A URL as an option takes it. What does not look like one is a path.
Url = Annotated[str, Field(pattern=_URL)]

# What the S3 client calls an answer, in its messages.
_REFUSED = re.compile(
    r"ACCESS_DENIED|AccessDenied|INVALID_ACCESS_KEY|InvalidAccessKey|SIGNATURE_DOES_NOT_MATCH|"
    r"SignatureDoesNotMatch|INVALID_CLIENT_TOKEN|EXPIRED_TOKEN|ExpiredToken|InvalidToken|"
    r"UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION|HTTP status 40[13]"
)
_UNREACHABLE = re.compile(
    r"NETWORK_CONNECTION|curlCode|REQUEST_TIMEOUT|timed? ?out|Couldn't resolve|Connection refused|"
    r"Could not (resolve|connect)|\(UNAVAILABLE",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"PERMANENT_REDIRECT|PermanentRedirect|HTTP status 301|AuthorizationHeader")


@dataclass(frozen=True)
class Location:
    """A file or a folder.

    Attributes:
        path: a local path, or a URL, as the user wrote it.
        storage: how the store of a URL is reached.
        size: bytes of a file that ``find`` found.
        changed: when it was changed, in nanoseconds, where its file system says that.
        seen: what tells the file from another one in its place, by what to call it; empty before it
            was looked at.
    """

    path: Path | str
    storage: Storage = field(default_factory=Storage)
    size: int | None = field(default=None, compare=False)
    changed: int | None = field(default=None, compare=False)
    seen: tuple[tuple[str, str | int], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """As messages show it: without what may let others in."""
        return str(self.path) if self.local else _shown(str(self.path))

    @property
    def local(self) -> Path | None:
        """The path, None for a URL."""
        return self.path if isinstance(self.path, Path) else None

    def find(self, suffix: str) -> list[Location]:
        """This file itself; or every file below this folder whose name ends with ``suffix``.

        Sorted by the parts of their paths. What starts with ``_`` or ``.`` is left out.

        Raises:
            DataError: there is no such place, or no such file in it.
            SetupError: the store cannot be reached, or refuses.
        """
        try:
            found = _find_local(self.path, suffix) if self.local else self._find_stored(suffix)
            self._refuse_part_of_table(found)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self}: cannot be listed: {error}") from error
        if found is None:
            relative = self.local and not Path(str(self)).is_absolute()
            where = f"; it is looked for in {Path.cwd()}" if relative else ""
            raise DataError(f"{self}: no such file or folder{where}")
        if not found:
            raise DataError(f"{self}: no *{suffix} file in this folder")
        return found

    def below(self, root: Location) -> str:
        """The path of this file below ``root``, with slashes; its name where it is ``root``."""
        mine = str(self.path) if self.local is None else self.local.as_posix()
        top = str(root.path) if root.local is None else root.local.as_posix()
        top = top.rstrip("/")
        if mine == top:
            return mine.rpartition("/")[2]
        return mine.removeprefix("" if top == "." else f"{top}/")

    def open(self) -> pa.NativeFile:
        """The file, to be read from any place of it.

        Raises:
            RecdError: it is not there, or the store refuses.
            OSError: a local file cannot be opened.
        """
        if self.local is not None:
            try:
                return pa.OSFile(str(self.local))
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{self}: the name is not UTF-8, and Arrow takes no other; rename the file or "
                    "folder"
                ) from error
        with self.told():
            files, path = self._file_system()
            return files.open_input_file(path)

    def state_of(self, source: pa.NativeFile) -> tuple[tuple[str, str | int], ...]:
        """What tells this file, which is open, from another one in its place.

        Size, time of change and inode of a local file; size and ETag of an object, or its time of
        change where its store has no ETag.
        """
        if self.local is not None:
            found = os.fstat(source.fileno())
            return (("size", found.st_size), (CHANGED, found.st_mtime_ns), ("inode", found.st_ino))
        size = source.size()
        if (tag := source.metadata().get("ETag")) is not None:
            return (("size", size), ("ETag", tag.decode(errors="replace")))
        files, path = self._file_system()
        return (("size", size), (CHANGED, files.get_file_info(path).mtime_ns or 0))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors of a store become those that say what, where and what to do; others stay.

        Raises:
            DataError: there is no such file, folder or bucket.
            SetupError: the store cannot be reached, or refuses.
        """
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if self.local is None and (meant := self._meaning(error)) is not None:
                raise meant from error
            raise

    def _refuse_part_of_table(self, found: list[Location] | None) -> None:
        path = str(self.path) if self.local is None else self.local.absolute().as_posix()
        if not found or found[0].path == self.path:
            return
        for folder, mark in product(tables_above(path), MARKS):
            place = f"{folder}/{mark}"
            there = self.local is not None and Path(place).exists()
            if self.local is None:
                with suppress(DataError):
                    there = bool(Location(place, self.storage)._find_stored(""))
            if there:
                refuse_table(folder, [mark])

    def _find_stored(self, suffix: str) -> list[Location] | None:
        with self.told():
            files, path = self._file_system(reaching=True)
            info = files.get_file_info(path)
            if info.type == pafs.FileType.NotFound:
                self._check_bucket(files, path)
                return None
            if info.type == pafs.FileType.File:
                return [self._found(info, str(self.path))]
            infos = files.get_file_info(pafs.FileSelector(path, recursive=True))
        root, top = path.rstrip("/"), str(self.path).rstrip("/")
        found = []
        for info in infos:
            below = info.path.removeprefix(root).lstrip("/")
            parts = below.split("/")
            refuse_table(top, parts)
            if (
                info.type == pafs.FileType.File
                and below.endswith(suffix)
                and not any(part.startswith((".", "_")) for part in parts)
            ):
                found.append((parts, self._found(info, f"{top}/{below}")))
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def _found(self, info: pafs.FileInfo, url: str) -> Location:
        return Location(url, self.storage, info.size, info.mtime_ns)

    def _check_bucket(self, files: pafs.FileSystem, path: str) -> None:
        if not isinstance(files, pafs.S3FileSystem):
            return
        bucket = path.partition("/")[0]
        if files.get_file_info(bucket).type == pafs.FileType.NotFound:
            raise DataError(f"{self}: there is no bucket {bucket} {self._where()}")

    def _file_system(self, *, reaching: bool = False) -> tuple[pafs.FileSystem, str]:
        url = str(self.path)
        parts = urlsplit(url)
        if _names_somebody(url):
            raise SetupError(
                f"the location {self} holds a user or a password; leave them out, credentials "
                "come from the environment"
            )
        path = url.partition("://")[2]
        if parts.scheme in ("s3", "gs", "gcs") and not parts.netloc:
            raise DataError(f"{self}: names no bucket; write {parts.scheme}://bucket/folder")
        if parts.scheme == "s3":
            return self._s3(), path
        if parts.scheme in ("gs", "gcs"):
            return self._gcs(reaching), path
        of_buckets = ("anonymous", "endpoint", "region")
        if set_here := [name for name in of_buckets if getattr(self.storage, name)]:
            raise SetupError(
                f"{self}: storage.{set_here[0]} is for s3:// and gs://; leave it out, "
                f"{parts.scheme}:// is set up by fsspec's own configuration"
            )
        if parts.scheme == "file":
            return pafs.LocalFileSystem(), parts.path
        return _through_fsspec(parts.scheme, url)

    def _s3(self) -> pafs.S3FileSystem:
        given = self.storage
        scheme, _, host = (given.endpoint or "").partition("://")
        return pafs.S3FileSystem(
            anonymous=given.anonymous,
            region=given.region,
            scheme=scheme or "https",
            endpoint_override=host or None,
            connect_timeout=given.connect_timeout,
            request_timeout=given.request_timeout,
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=given.attempts),
        )

    def _gcs(self, reaching: bool) -> pafs.FileSystem:
        from datetime import timedelta

        given = self.storage
        scheme, _, host = (given.endpoint or "").partition("://")
        # It has one limit, for all attempts: of the first request, that of reaching the store.
        seconds = given.connect_timeout if reaching else given.request_timeout
        return pafs.GcsFileSystem(
            anonymous=given.anonymous,
            scheme=scheme or "https",
            endpoint_override=host or None,
            retry_time_limit=timedelta(seconds=seconds * given.attempts),
        )

    def _where(self) -> str:
        return f"at {self.storage.endpoint}" if self.storage.endpoint else "at its provider"

    def _meaning(self, error: Exception) -> RecdError | None:
        text = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self}: no such file or folder")
        if "NO_SUCH_BUCKET" in text:
            bucket = urlsplit(str(self.path)).netloc
            return DataError(f"{self}: there is no bucket {bucket} {self._where()}")
        if _REFUSED.search(text) or isinstance(error, PermissionError):
            return SetupError(
                f"{self}: access is refused {self._where()}"
                f"{' without credentials' if self.storage.anonymous else ''}; {_credentials(self)} "
                f"({text})"
            )
        if _ELSEWHERE.search(text):
            return SetupError(
                f"{self}: the bucket is in another region; set storage.region ({text})"
            )
        if _UNREACHABLE.search(text) or isinstance(error, TimeoutError | ConnectionError):
            return SetupError(
                f"{self}: the store cannot be reached {self._where()}, in {self.storage.attempts} "
                f"attempts of {self.storage.connect_timeout:g} s (storage.connect_timeout); check "
                f"storage.endpoint and the network ({text})"
            )
        return None


def _names_somebody(url: str) -> bool:
    """Whether a URL has a user before its host; a secret may have slashes, a bucket no colon."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    return "@" in host or (scheme in ("s3", "gs", "gcs") and ":" in host)


def _shown(url: str) -> str:
    """A URL without the user before its host, and without the signature that a query may be."""
    scheme, _, rest = url.partition("://")
    if _names_somebody(url):
        rest = f"...@{rest.rpartition('@')[2]}" if "@" in rest else "..."
    if scheme in ("http", "https") and "?" in rest:
        rest = f"{rest.partition('?')[0]}?..."
    return f"{scheme}://{rest}"


def _credentials(location: Location) -> str:
    scheme = urlsplit(str(location.path)).scheme
    if scheme == "s3":
        return (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for one of "
            "~/.aws/credentials, that may list and read it; for public data set "
            "storage: {anonymous: true}"
        )
    return "set up credentials that may list and read it, as its file system documents them"


def _through_fsspec(scheme: str, url: str) -> tuple[pafs.FileSystem, str]:
    try:
        import fsspec
    except ImportError as error:
        raise SetupError(
            f'{_shown(url)}: {scheme}:// needs fsspec: pip install "recd-plugins[fsspec]", and the '
            f"package of that file system"
        ) from error
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise SetupError(f"{_shown(url)}: {error}") from error
    except ValueError as error:
        raise SetupError(
            f"{_shown(url)}: neither pyarrow nor fsspec knows {scheme}://; use a path, s3://, "
            f"gs:// or what fsspec has ({error})"
        ) from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(files)), path


def _find_local(path: Any, suffix: str) -> list[Location] | None:
    if path.is_file():
        return [_local(path)]
    if not path.is_dir():
        return None
    found: list[Path] = []
    for folder, folders, files in os.walk(path, onerror=_raise):
        inside = Path(folder).relative_to(path).parts
        for name in (*folders, *files):
            refuse_table(str(path), [*inside, name])
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for inner in (Path(folder, name) for name in folders):
            if inner.is_symlink():
                raise DataError(
                    f"{inner}: a link to a folder, which is not followed, so that its rows would "
                    "be missing; put the files there, or start its name with _ to leave it out"
                )
        found += [
            Path(folder, name)
            for name in files
            if name.endswith(suffix) and not name.startswith((".", "_"))
        ]
    for file in found:
        if not file.is_file():
            raise DataError(
                f"{file}: no file, but a link to nowhere, a pipe or a device; remove it, or start "
                "its name with _ to leave it out"
            )
    return [_local(file) for file in sorted(found)]


def _raise(error: OSError) -> None:
    raise error


def _local(path: Path) -> Location:
    found = path.stat()
    return Location(path, size=found.st_size, changed=found.st_mtime_ns)
