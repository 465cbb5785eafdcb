"""Parts of commands: types and groups of options, checks before the work, progress bars.

``CHECKPOINT``, ``RANKS`` and ``BATCH_SIZE`` are options of commands that take a trained model, and
``overrides`` makes fields of ``training:`` of the last two. ``SETTINGS`` is ``KEY=VALUE`` of a
command that reads a registry file. ``output_console`` is where what was found is printed.

For plugins that have commands of their own (``register_commands``) or modes of ``recd plan``;
``TablesPlan`` is what it does without a mode.
Needs click and no torch.
"""

from recd_plugins.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    BATCH_SIZE,
    CHECKPOINT,
    COUNT_FROM_0,
    OUTPUT,
    OUTPUT_FOLDER,
    OUTPUT_OR_TERMINAL,
    OUTPUT_PATH,
    PAGE,
    RANKS,
    REGISTRY,
    SETTINGS,
    SHARE,
    TOPOLOGY,
    FileKind,
    FiniteFloat,
    check_apart,
    check_output,
    chosen_topology,
    new_place,
    overrides,
    report_options,
    table_kind,
    text_kind,
    topology_options,
)
from recd_plugins.cores import available_cores
from recd_plugins.output_console import error_console, output_console
from recd_plugins.planning.plan_mode import TablesPlan
from recd_plugins.progress import AddBar, progress_bars, row_progress
from recd_plugins.training.checkpoint_files import chosen_checkpoint
from recd_plugins.upstream_noise import silence as silence_upstream

__all__ = [
    "ABOVE_0",
    "AT_LEAST_1",
    "BATCH_SIZE",
    "CHECKPOINT",
    "COUNT_FROM_0",
    "OUTPUT",
    "OUTPUT_FOLDER",
    "OUTPUT_OR_TERMINAL",
    "OUTPUT_PATH",
    "PAGE",
    "RANKS",
    "REGISTRY",
    "SETTINGS",
    "SHARE",
    "TOPOLOGY",
    "AddBar",
    "FileKind",
    "FiniteFloat",
    "TablesPlan",
    "available_cores",
    "check_apart",
    "check_output",
    "chosen_checkpoint",
    "chosen_topology",
    "error_console",
    "new_place",
    "output_console",
    "overrides",
    "progress_bars",
    "report_options",
    "row_progress",
    "silence_upstream",
    "table_kind",
    "text_kind",
    "topology_options",
]
