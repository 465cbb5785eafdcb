"""The versions of the plugins that a registry file names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from recd_plugins.interfaces import Plugin
from recd_plugins.manager import PluginManager
from recd_plugins.plugin_modules import modules_of_files
from recd_plugins.registry.run_config import RunConfig


def plugin_versions(registry: RunConfig) -> dict[str, str]:
    """Of each plugin: its distribution and version, or a digest of the file or folder it is of.

    Raises:
        PluginError: one is there that no file names, and what has such names is broken.
    """
    sections = [registry.wrappers, *map(registry.entries, registry.kinds)]
    plugins: list[Plugin] = [entry.plugin for section in sections for entry in section]
    manager = PluginManager()
    versions = {}
    for plugin in plugins:
        top = type(plugin).__module__.partition(".")[0]
        if file := modules_of_files([type(plugin)]).get(top):
            version = _version_of(file)
        elif top == "recd_plugins":
            version = top
        else:
            found = manager.find(plugin.kind, plugin.name)
            version = found.origin if found is not None else top
        versions[plugin.name] = version
    return versions


def _version_of(file: Path) -> str:
    if file.name != "__init__.py":
        return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    digest = hashlib.sha256()
    modules = (path for path in file.parent.rglob("[!.]*.py") if path.is_file())
    for module in sorted(modules):
        digest.update(f"{module.relative_to(file.parent)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(module.read_bytes()).digest())
    return f"{file.parent.name} {digest.hexdigest()[:12]}"
