"""Plugins that tests write into a folder."""

from __future__ import annotations

from pathlib import Path

HEAD = """\
from pydantic import Field
from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import *
from recd_plugins.runtime.errors import DataError, SetupError
"""
HOOK = """
@hookimpl
def register_plugins():
    return [{}]
"""


def write_plugins(folder: Path, code: str, *classes: str) -> Path:
    """Write ``folder/plugins/acme.py`` of HEAD and the code, which registers the classes.

    Returns:
        The folder of the file.
    """
    path = folder / "plugins" / "acme.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + code + HOOK.format(", ".join(classes)), encoding="utf-8")
    return path.parent
