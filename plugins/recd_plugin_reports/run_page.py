"""``recd run --html``: the page of a run, without a file of ``--json`` between."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recd_plugins.api import RunReport
from recd_plugins.api.files import write_text


class RunPage(RunReport):
    """A page of HTML."""

    flag = "--html"
    help = "Write them as a page, as recd report does."

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """The page of ``recd report``."""
        from recd_plugin_reports.page import page
        from recd_plugin_reports.runs import runs_of

        write_text(path, page(runs_of(report)))
