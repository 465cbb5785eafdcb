"""A registry document with another sharding for the same tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from recd_plugins.errors import RegistryError
from recd_plugins.registry.loader import Document

_BOOL = TypeAdapter(bool)


def with_sharding(document: Document, name: str, *, chooses: bool) -> Document:
    """The document with the plugin ``name`` in place of its first ``sharding`` entry.

    An entry of that plugin for the same ``tables``, enabled or not, says its options; without one
    they are the plugin's defaults. A chooser stands in a file once: one that is there already takes
    the first entry's tables besides its own.

    Args:
        document: of a registry file.
        name: of the plugin.
        chooses: whether it is a chooser, which takes all tables that are left.

    Raises:
        RegistryError: no entry is enabled, so that no tables are named; or the first one takes what
            others leave, as a chooser alone can.
    """
    entries = document.data.get("sharding")
    entries = list(entries) if isinstance(entries, list) else []
    first = next((i for i, entry in enumerate(entries) if _enabled(entry)), None)
    if first is None and chooses:
        entries.append({"use": name})
        return replace(document, data={**document.data, "sharding": entries})
    if first is None:
        raise RegistryError(
            [
                document.problem(
                    ("sharding",),
                    f"has no entry that is enabled, whose tables {name} could take; add one",
                )
            ]
        )
    tables = entries[first].get("tables")
    other = next((i for i, entry in enumerate(entries) if _is(entry, name, tables)), None)
    if other is None and chooses:
        enabled = [i for i, entry in enumerate(entries) if _enabled(entry)]
        other = next((i for i in enabled if entries[i].get("use") == name), None)
        if other is not None:
            entries[other] = _with_tables(entries[other], tables)
    if other is None and tables is None and not chooses and sum(map(_enabled, entries)) > 1:
        raise RegistryError(
            [
                document.problem(
                    ("sharding", first),
                    f"takes the tables that other entries leave, which {name} in its place cannot: "
                    "give it tables",
                )
            ]
        )
    if other is None:
        entries[first] = {"tables": ["*"], **entries[first], "use": name, "options": {}}
    else:
        entries[first] = {**entries[first], "enabled": False}
        entries[other] = {**entries[other], "enabled": True}
    return replace(document, data={**document.data, "sharding": entries})


def _enabled(entry: Any) -> bool:
    """Whether an entry is by the schema, to which ``yes`` is true; what is neither it refuses."""
    try:
        return isinstance(entry, dict) and _BOOL.validate_python(entry.get("enabled", True))
    except ValidationError:
        return False


def _is(entry: Any, name: str, tables: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("use") == name
        and _in_any_order(entry.get("tables")) == _in_any_order(tables)
    )


def _with_tables(entry: dict[str, Any], tables: Any) -> dict[str, Any]:
    """A chooser's entry that takes these too; without tables it takes all that others leave."""
    own = entry.get("tables")
    if tables is None:
        return {key: value for key, value in entry.items() if key != "tables"}
    if isinstance(own, list) and isinstance(tables, list):
        return {**entry, "tables": [*own, *tables]}
    return entry


def _in_any_order(tables: Any) -> Any:
    return sorted(map(str, tables)) if isinstance(tables, list) else tables
