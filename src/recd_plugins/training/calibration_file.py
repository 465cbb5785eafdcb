"""What calibrations have in common: the job that they train, and the file that they write."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from recd_plugins.data.wrapped_dataset import wrapped_dataset
from recd_plugins.errors import RecdError
from recd_plugins.files import write_text
from recd_plugins.planning.topologies import TopologySpec, is_file_name
from recd_plugins.registry import RunConfig
from recd_plugins.training.job import Job


def calibration_job(
    registry: RunConfig,
    plugins_dir: Path | None,
    spec: TopologySpec,
    path: Path,
    batch_size: int | None = None,
) -> tuple[RunConfig, Job]:
    """``registry`` with as many ranks as ``spec`` has and its data there, and what trains it.

    With ``batch_size`` rows of a rank in place of those of the file.

    Raises:
        RecdError: ``path``, which is to be written, exists already, or the data cannot be had.
    """
    refuse_existing(path)
    overrides: dict[str, Any] = {
        "ranks": spec.ranks_per_node,
        "ranks_per_node": None,
        "checkpoint": {},
        "topology": None,  # which may be of other ranks than those of this machine
    }
    if batch_size is not None:
        overrides["batch_size"] = batch_size
    registry = registry.with_training(overrides)
    wrapped_dataset(registry).prepare()
    job = Job(
        registry.path,
        plugins_dir=plugins_dir,
        overrides=overrides,
        device=spec.device,
        text=registry.text,
    )
    return registry, job


def refuse_other_names(path: Path) -> None:
    """Refuse a name under which nothing finds a topology; before anything is measured for it.

    Raises:
        RecdError: it does not end in .yaml.
    """
    if not is_file_name(path.name):
        raise RecdError(f"{path}: the file of a topology ends in .yaml; name another")


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite a topology, and other names; before anything is measured for it.

    Raises:
        RecdError: there is such a file already, or the name does not end in .yaml.
    """
    refuse_other_names(path)
    if path.exists():
        raise RecdError(f"{path} exists already; remove it, or name another file")


def write_topology(path: Path, spec: TopologySpec, comment: str) -> None:
    """Write what ``read_topology`` takes, whole or not at all; what lacks its end is refused then.

    Raises:
        RecdError: the place cannot be written.
    """
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    values = spec.model_dump(exclude_none=True)
    # What no topology lacks is last: a file that was cut has no device, or none that there is.
    values["device"] = values.pop("device")
    yaml.dump(values, text)
    write_text(path, f"# {comment}\n{text.getvalue()}")
