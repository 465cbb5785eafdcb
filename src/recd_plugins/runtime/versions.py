"""Checks that the installed torch, FBGEMM and TorchRec are compatible with this package."""

from __future__ import annotations

import importlib.metadata
from functools import cache

__version__ = "0.2.0"

#: Maps the torch version to the matching versions of fbgemm and torchrec.
SETS = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}


def fbgemm_builds() -> dict[str, str]:
    """Return a dict from distribution name to version of the installed FBGEMM builds."""
    builds = {}
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        if (version := _installed(name)) is None:
            continue
        files = importlib.metadata.files(name) or []
        if any(file.parts[0] == "fbgemm_gpu" for file in files):
            builds[name] = version
    return builds


def fbgemm_has_cuda() -> bool:
    """Return whether the CUDA build of FBGEMM is installed, and not the CPU build."""
    # PyTorch's index has a CPU build with the same name.
    builds = fbgemm_builds()
    return list(builds) == ["fbgemm-gpu"] and not builds["fbgemm-gpu"].endswith("+cpu")


@cache
def installed_set() -> str:
    """Return the installed versions as text: ``torch 2.13.0, fbgemm 1.8.0, torchrec 1.8.0``."""
    torch, fbgemm, torchrec = _versions()
    return f"torch {torch}, fbgemm {fbgemm}, torchrec {torchrec}"


def mismatch() -> str:
    """Return which versions to install if the installed versions are incompatible, else ""."""
    torch, fbgemm, torchrec = (
        None if version is None else ".".join(version.split(".")[:2]) for version in _versions()
    )
    belongs = SETS.get(torch or "")
    if belongs is None:
        sets = (f"torch {key}, fbgemm {value}, torchrec {value}" for key, value in SETS.items())
        return f"install one of these sets of versions: {'; '.join(sets)}"
    if fbgemm != belongs or torchrec != belongs:
        return f"with torch {torch} install fbgemm {belongs}.* and torchrec {belongs}.*"
    return ""


def _versions() -> tuple[str | None, str | None, str | None]:
    fbgemm = next(iter(fbgemm_builds().values()), None)
    return _installed("torch"), fbgemm, _installed("torchrec")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
