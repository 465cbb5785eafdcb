"""Is Ray there, and one that ``limit.py`` knows?"""

from __future__ import annotations

import importlib.metadata

from recd_plugins.api import SetupError

#: The oldest one whose tasks ``limit.py`` can bound, and the first that is refused unseen.
OLDEST, TOO_NEW = (2, 60), (2, 61)

_INSTALL = 'pip install "recd-plugins[ray]"'


def check_ray() -> None:
    """Look at what is installed, without importing it.

    Raises:
        SetupError: Ray is missing, too old or too new; says what to install.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError(
            f"dsi.ray runs readers on Ray, which is not installed: {_INSTALL}; or take the "
            "ingestion section out, and the trainer reads by itself"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        oldest, too_new = (".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
        raise SetupError(
            f"dsi.ray needs Ray {oldest} or newer, below {too_new}, and {version} is there: "
            f"{_INSTALL}"
        )
