"""A package with a kind of plugins of its own, audits of tables, and one of them."""

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
            description="What is noted of the ids that tables are read by, one entry a table.",
            observes=True,
        )
    ]


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [CountLookups]
