"""A file system that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of ``size``, such as 64k, in ``folder``; skip the test without root."""
    mounted = folder / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root mounts a file system")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
