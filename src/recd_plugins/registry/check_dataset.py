"""Options of a dataset that do not suit its data, with the lines where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recd_plugins.errors import PluginError, RegistryError
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry.loader import read_yaml
from recd_plugins.registry.run_config import RunConfig
from recd_plugins.registry.settings import with_settings


def check_dataset(registry: RunConfig, settings: Sequence[str] = ()) -> None:
    """Ask the dataset of a registry what of its options is wrong.

    Args:
        registry: of a file.
        settings: values in place of the file's.

    Raises:
        RegistryError: something is; names each line.
        PluginError: it names no options.
    """
    with plugin_call(registry.dataset, "mistakes"):
        mistakes = list(registry.dataset.mistakes())
    if mistakes:
        if not all(map(_names_an_option, mistakes)):
            raise PluginError(
                f"{registry.dataset.title}: mistakes returned {mistakes!r:.200}; expected pairs of "
                "the keys that lead to an option, as ('columns', 'devise'), and what is wrong"
            )
        document = with_settings(read_yaml(registry.path, text=registry.text), settings)
        raise RegistryError(
            [document.problem(("dataset", "options", *option), what) for option, what in mistakes]
        )


def _names_an_option(mistake: Any) -> bool:
    match mistake:
        case ((*_,), str()):
            return True
    return False
