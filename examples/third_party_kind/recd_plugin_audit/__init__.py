"""An example package that adds the plugin kind ``audit`` and one audit plugin."""

from collections.abc import Sequence

from recd_plugin_audit.audit import Audit
from recd_plugin_audit.lookups import CountLookups
from recd_plugins.api import Kind, Plugin, hookimpl

__all__ = ["Audit"]


@hookimpl
def register_kinds() -> Sequence[Kind]:
    return [
        Kind(
            name="audit",
            interface=Audit,
            section="audits",
            claims="by table",
            description="Audit of the ids looked up in tables, with one entry per table.",
            observes=True,
        )
    ]


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [CountLookups]
