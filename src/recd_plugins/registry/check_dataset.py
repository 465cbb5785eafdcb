"""Options of a dataset that do not suit its data, with the lines where they stand."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.errors import RegistryError
from recd_plugins.registry.loader import read_yaml
from recd_plugins.registry.registry import Registry
from recd_plugins.registry.settings import with_settings


def check_dataset(registry: Registry, settings: Sequence[str] = ()) -> None:
    """Ask the dataset of a registry what of its options is wrong.

    Args:
        registry: of a file.
        settings: values in place of the file's.

    Raises:
        RegistryError: something is; names each line.
    """
    if mistakes := registry.dataset.mistakes():
        document = with_settings(read_yaml(registry.path, text=registry.text), settings)
        raise RegistryError(
            [document.problem(("dataset", "options", *option), what) for option, what in mistakes]
        )
