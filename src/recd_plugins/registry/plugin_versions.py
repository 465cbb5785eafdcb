"""The versions of the plugins that a registry file names."""

from __future__ import annotations

import hashlib
import importlib.metadata

from recd_plugins.interfaces import Plugin
from recd_plugins.plugin_modules import GROUP, modules_of_files
from recd_plugins.registry.registry import Registry


def plugin_versions(registry: Registry) -> dict[str, str]:
    """Of each plugin: its distribution and version, or a digest of the file that it came from."""
    sections = [registry.wrappers, *map(registry.entries, registry.kinds)]
    plugins: list[Plugin] = [entry.plugin for section in sections for entry in section]
    distributions = {
        entry_point.module.partition(".")[0]: entry_point.dist
        for entry_point in importlib.metadata.entry_points(group=GROUP)
    }
    versions = {}
    for plugin in plugins:
        top = type(plugin).__module__.partition(".")[0]
        if file := modules_of_files([type(plugin)]).get(top):
            version = f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
        else:
            dist = distributions.get(top)
            version = f"{dist.name} {dist.version}" if dist is not None else top
        versions[plugin.name] = version
    return versions
