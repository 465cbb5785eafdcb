"""A table of files: one of them, or all in a folder and the folders below it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from recd_plugin_tables.sources.file_format import FileFormat, format_errors
from recd_plugin_tables.sources.source import Source, check_names
from recd_plugins.api import DataError, Location, Origin, Rows

# The folder of a Hive partition whose key is null.
_NULL_KEY = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile("-?[0-9]+")
_BLOCK = 1 << 22


class FileSource(Source):
    """Files of one format, in the order of their names; keys of Hive partitions are columns.

    Keys that the files hold themselves are as they hold them. Folders that lead to the location
    count, so that one partition has the columns of the whole table.

    Args:
        root: the location.
        files: of it, all that are read.
        form: of the files.
        texts: keys that are text even where all are numbers.

    Raises:
        DataError: a file is damaged or of another format, or two differ in their columns.
    """

    def __init__(
        self,
        root: Location,
        files: Sequence[Location],
        form: FileFormat,
        texts: Collection[str] = (),
    ) -> None:
        self.location = str(root)
        self._root, self._files, self._format = root, tuple(files), form
        above = _folders_above(root, is_file=files[0].path == root.path)
        keys = [_keys([*above, *file.below(root).split("/")[:-1]]) for file in files]
        self._keys = {
            name: _key_column([key.get(name) for key in keys], as_text=name in texts)
            for name in keys[0]
        }
        for file, key in zip(files, keys, strict=True):
            if key.keys() != keys[0].keys():
                raise DataError(
                    f"files of one table differ: {files[0]} is in folders of the keys "
                    f"{', '.join(keys[0]) or 'none'}, {file} of {', '.join(key) or 'none'}"
                )

    @cached_property
    def schema(self) -> pa.Schema:
        fields = [pa.field(name, self._keys[name].type) for name in self.folder_keys]
        return check_names(self.location, pa.schema([*self._inner, *fields]))

    @property
    def folder_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self._keys if name not in self._inner.names)

    @cached_property
    def num_rows(self) -> int | None:
        total = 0
        for file in self._files:
            with format_errors(file, self._format.name):
                count = self._format.num_rows(file)
            if count is None:
                return None
            total += count
        return total

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        inner = frozenset(self._inner.names)  # a schema makes its names anew each time
        stored = [name for name in names if name in inner]
        for number, file in enumerate(self._files):
            first_row = 0
            with format_errors(file, self._format.name):
                # A column at least, for the number of rows.
                for batch in self._format.read(file, self._inner, stored or self._inner.names[:1]):
                    arrays = [
                        _cast(batch.column(field.name), field, file, first_row)
                        if field.name in inner
                        else self._keys[field.name].take(pa.array([number] * batch.num_rows))
                        for field in schema
                    ]
                    origin = Origin(str(file), first_row, batch.num_rows)
                    first_row += batch.num_rows
                    yield Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), (origin,))

    def identity(self) -> dict[str, Any]:
        return {"format": self._format.name, "files": self._versions}

    @cached_property
    def _versions(self) -> list[list[str | int | None]]:
        """Name, size and time of change of each; a digest where its store tells no times."""
        return [
            [
                file.below(self._root),
                file.size,
                _digest(file) if file.changed is None else file.changed,
            ]
            for file in self._files
        ]

    @cached_property
    def _inner(self) -> pa.Schema:
        """The columns of all files, of the wider type where numbers differ in it."""
        first = known = self._schema(self._files[0])
        for file in self._files[1:]:
            schema = self._schema(file)
            if alone := {*first.names} ^ {*schema.names}:
                name = next(each for each in [*first.names, *schema.names] if each in alone)
                pair = self._files[0], file
                has, lacks = pair if name in first.names else pair[::-1]
                raise DataError(
                    f"files of one table differ: {lacks} has no column {name}, which {has} has"
                )
            try:
                known = pa.unify_schemas([known, schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(
                    f"files of one table differ: {_difference(known, schema)} in {file} ({error}); "
                    "write them with the same types, or name types of text by option types"
                ) from error
        return known

    def _schema(self, file: Location) -> pa.Schema:
        with format_errors(file, self._format.name):
            return check_names(str(file), self._format.schema(file)).remove_metadata()


def _digest(file: Location) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.told(), file.open() as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _folders_above(root: Location, *, is_file: bool) -> list[str]:
    """The last folders of a location that are keys, one below the other."""
    path = root.local.absolute().as_posix() if root.local is not None else str(root.path)
    folders = path.rstrip("/").split("/")
    above = takewhile(lambda folder: "=" in folder, reversed(folders[:-1] if is_file else folders))
    return [*reversed([*above])]


def _keys(folders: Sequence[str]) -> dict[str, str]:
    return dict(folder.split("=", 1) for folder in folders if "=" in folder)


def _key_column(words: Sequence[str | None], *, as_text: bool) -> pa.Array:
    """What the files' folders say: numbers where all are, and none is another's, unless they are
    text."""
    values = [None if word in (None, _NULL_KEY) else unquote(str(word)) for word in words]
    distinct = {value for value in values if value is not None}
    if as_text or not all(_WHOLE.fullmatch(value) for value in distinct):
        return pa.array(values, pa.string())
    numbers = {value: int(value) for value in distinct}
    if len(set(numbers.values())) < len(distinct):  # as 0123 and 123 of a code
        return pa.array(values, pa.string())
    try:
        return pa.array([None if value is None else numbers[value] for value in values], pa.int64())
    except OverflowError:
        return pa.array(values, pa.string())


def _cast(column: pa.Array, field: pa.Field, file: Location, first_row: int) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"{file}: column {field.name}, rows from {first_row} (from 0): {error}"
        ) from error


def _difference(known: pa.Schema, schema: pa.Schema) -> str:
    for field in known:
        try:
            pa.unify_schemas(
                [pa.schema([field]), pa.schema([schema.field(field.name)])],
                promote_options="permissive",
            )
        except pa.ArrowException:
            was, now = field.type, schema.field(field.name).type
            return f"column {field.name} is {was} in those before and {now}"
    return "columns differ"
