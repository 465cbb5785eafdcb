"""Files and folders that are written whole or not at all, notes beside them, and byte sizes.

For whatever writes: commands, datasets that keep what they found, benchmarks. Needs no torch.
"""

from recd_plugins.byte_sizes import bytes_text, read_bytes
from recd_plugins.file_lock import locked_folder, try_lock
from recd_plugins.files import (
    check_regular,
    check_writable,
    finite,
    is_stream,
    json_text,
    new_file,
    parse_json,
    read_note,
    real_path,
    why_not,
    without_remains,
    write_figure,
    write_json,
    write_note,
    write_text,
)
from recd_plugins.scratch_folder import put, scratch_folder
from recd_plugins.work_folder import WorkFolder, machine_start, work_folder

__all__ = [
    "WorkFolder",
    "bytes_text",
    "check_regular",
    "check_writable",
    "finite",
    "is_stream",
    "json_text",
    "locked_folder",
    "machine_start",
    "new_file",
    "parse_json",
    "put",
    "read_bytes",
    "read_note",
    "real_path",
    "scratch_folder",
    "try_lock",
    "why_not",
    "without_remains",
    "work_folder",
    "write_figure",
    "write_json",
    "write_note",
    "write_text",
]
