"""Parts of commands: types and groups of options, checks before the work, progress bars.

For plugins that have commands of their own (``register_commands``) or modes of ``recd plan``.
Needs click and no torch.
"""

from recd_plugins.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT_FROM_0,
    OUTPUT,
    SHARE,
    FiniteFloat,
    check_outputs,
    check_reports,
    chosen_topology,
    report_options,
    topology_options,
)
from recd_plugins.progress import AddBar, progress_bars, row_progress
from recd_plugins.upstream_noise import silence as silence_upstream

__all__ = [
    "ABOVE_0",
    "AT_LEAST_1",
    "COUNT_FROM_0",
    "OUTPUT",
    "SHARE",
    "AddBar",
    "FiniteFloat",
    "check_outputs",
    "check_reports",
    "chosen_topology",
    "progress_bars",
    "report_options",
    "row_progress",
    "silence_upstream",
    "topology_options",
]
