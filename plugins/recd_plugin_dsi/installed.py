"""Is Ray there, and new enough?"""

from __future__ import annotations

import importlib.metadata

from recd_plugins.errors import SetupError

#: The oldest one whose tasks ``limit.py`` can bound.
OLDEST = (2, 60)

_INSTALL = 'pip install "recd-plugins[ray]"'


def check_ray() -> None:
    """Look at what is installed, without importing it.

    Raises:
        SetupError: Ray is missing or too old; says what to install.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise SetupError(
            f"dsi.ray runs readers on Ray, which is not installed: {_INSTALL}; or take the "
            "ingestion section out, and the trainer reads by itself"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SetupError(f"dsi.ray needs Ray {oldest} or newer, and {version} is there: {_INSTALL}")
