"""A small table in files, and programs that have one."""

import os
import sys

from tests import forked

from recd_plugin_scars.runtime.mapped_file import FileStore

NUM_ROWS, DIM = 50, 6


def open_store(
    folder, *, keep=False, name="t", num_rows=NUM_ROWS, dim=DIM, with_state=True, shards=()
):
    return FileStore(
        folder,
        keep=keep,
        name=name,
        num_rows=num_rows,
        dim=dim,
        with_state=with_state,
        shards=shards,
    )


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def command(program, *arguments):
    return [sys.executable, "-c", program, *arguments]


def finish(program, *arguments):
    return forked.run(command(program, *arguments), check=True).stdout


def truncate(folder):
    os.truncate(next(folder.glob("*/weights")), 4 * NUM_ROWS * DIM - 1)
