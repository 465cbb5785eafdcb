"""What a file says and pydantic lets pass, although it was not meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from recd_plugins.registry.loader import Location

# Of file systems: a name, and a path.
_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def misread(raw: Any, value: Any, location: Location = ()) -> Iterator[tuple[Location, str]]:
    """Where ``value`` is something else than what was written, and what is wrong there.

    Args:
        raw: what the file says.
        value: what a model made of it.
        location: of both in the file.
    """
    if isinstance(raw, dict):
        for key, item in raw.items():
            if isinstance(value, BaseModel):
                yield from misread(item, getattr(value, key, None), (*location, key))
            elif isinstance(value, dict):
                yield from misread(item, value.get(key), (*location, key))
    elif isinstance(raw, list) and isinstance(value, list | tuple):
        for index, (item, made) in enumerate(zip(raw, value, strict=False)):
            yield from misread(item, made, (*location, index))
    elif isinstance(raw, bool) and type(value) in (int, float):
        yield location, f"input should be a number, got {raw}"
    elif isinstance(raw, str) and isinstance(value, Path) and (wrong := wrong_path(raw)):
        yield location, wrong


def wrong_path(text: str) -> str | None:
    """What is wrong with a path, whatever there is in the file system."""
    if not text.strip():
        return f"input should be a path, got {text!r}"
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > _LONGEST_NAME or len(os.fsencode(text)) > _LONGEST_PATH:
        return (
            f"input should be a path of at most {_LONGEST_PATH} bytes, of names of at most "
            f"{_LONGEST_NAME}, got {len(text):,} characters"
        )
    return None
