"""A registry file as trackers show it: nested values."""

from __future__ import annotations

from typing import Any

from recd_plugins.api import RunStart


def config_of(start: RunStart) -> dict[str, Any]:
    """What the registry file says, and what was set in place of it."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(start.registry)
    except YAMLError:  # of a start that a program made
        found = None
    values = found if isinstance(found, dict) else {}
    return {**values, "settings": list(start.settings)}
