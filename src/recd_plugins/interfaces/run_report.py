"""A file that ``recd run`` writes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


class RunReport(ABC):
    """A file that ``recd run`` writes of a run, besides ``--json``; ``register_reports`` adds it.

    A subclass is made without arguments. Its module imports neither torch nor torchrec at the top,
    as ``recd run --help`` shows every one.

    Attributes:
        flag: the option that names the file, as ``--markdown``.
        help: of the option.
    """

    flag: ClassVar[str]
    help: ClassVar[str]

    @abstractmethod
    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write the file, once a run or a comparison is over, on rank 0.

        Args:
            path: where to; found writable before the run.
            report: what ``--json`` writes.
        """
