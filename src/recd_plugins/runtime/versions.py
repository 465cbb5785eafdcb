"""The version of recd-plugins, and of torch, FBGEMM and torchrec; imports none of them."""

from __future__ import annotations

import importlib.metadata
from functools import cache

__version__ = "0.1.0"

#: fbgemm and torchrec by torch: the sets that were built for one another.
SETS = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}


def fbgemm_builds() -> dict[str, str]:
    """Version by name of the installed distributions that really hold FBGEMM.

    On machines without CUDA a distribution named fbgemm-gpu may hold metadata only.
    """
    builds = {}
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        if (version := _installed(name)) is None:
            continue
        files = importlib.metadata.files(name) or []
        if any(file.parts[0] == "fbgemm_gpu" for file in files):
            builds[name] = version
    return builds


def fbgemm_has_cuda() -> bool:
    """Whether the CUDA build of FBGEMM is installed, and not the CPU build over or instead of it.

    PyTorch's own index calls the CPU build fbgemm-gpu too, with a version that ends in ``+cpu``.
    """
    builds = fbgemm_builds()
    return list(builds) == ["fbgemm-gpu"] and not builds["fbgemm-gpu"].endswith("+cpu")


@cache
def installed_set() -> str:
    """The three versions, as ``torch 2.13.0, fbgemm 1.8.0, torchrec 1.8.0``."""
    torch, fbgemm, torchrec = _versions()
    return f"torch {torch}, fbgemm {fbgemm}, torchrec {torchrec}"


def mismatch() -> str:
    """What to install so that the three belong together; empty where they do."""
    torch, fbgemm, torchrec = (_minor(version) for version in _versions())
    belongs = SETS.get(torch or "")
    if belongs is None:
        return one_of_the_sets()
    if fbgemm != belongs or torchrec != belongs:
        return f"with torch {torch} install fbgemm {belongs}.* and torchrec {belongs}.*"
    return ""


def one_of_the_sets() -> str:
    """What to install, where nothing that is installed says which set."""
    sets = (f"torch {key}, fbgemm {value}, torchrec {value}" for key, value in SETS.items())
    return f"install one of the sets: {'; '.join(sets)}"


def _versions() -> tuple[str | None, str | None, str | None]:
    fbgemm = next(iter(fbgemm_builds().values()), None)
    return _installed("torch"), fbgemm, _installed("torchrec")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split(".")[:2])
