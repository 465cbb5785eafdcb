"""What preprocessing was fitted to be, as tensors that a checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from recd_plugins.data.apply_step import step_call
from recd_plugins.data.feature_steps import feature_steps
from recd_plugins.interfaces import Preprocessing
from recd_plugins.registry import Entry, RunConfig

#: Tensors by number of the entry, feature ("" where all share one) and name, in a name as JSON.
FittedState = Mapping[str, Tensor]


def fitted_state(registry: RunConfig) -> dict[str, Tensor]:
    """What ``fit`` decided in each entry that says so; nothing of one that is not fitted yet.

    Raises:
        PluginError: a step fails to say it.
    """
    found = {}
    for number, entry in _entries(registry):
        for feature, step in (entry.plugin.fitted or {}).items():
            of = "" if step.fits_together else feature
            with step_call(step, f"fitted_state of {feature}"):
                for name, tensor in step.fitted_state().items():
                    found[json.dumps([number, of, name])] = array = tensor.detach().cpu()
                    array.numpy()  # as it is kept, which bfloat16 is not
    return found


def load_fitted_state(registry: RunConfig, state: FittedState, entries: Collection[int]) -> None:
    """Make entries what they were, in place of fitting; one that ``state`` lacks is left unfitted.

    Args:
        registry: its preprocessing.
        state: what was fitted.
        entries: numbers of those that are what they were then.

    Raises:
        RecdError: a step does not take it.
    """
    to_load = [
        (number, entry.plugin)
        for number, entry in _entries(registry)
        if number in entries and entry.plugin.fitted is None
    ]
    if not to_load or not state:
        return
    by_step: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        number, feature, name = json.loads(key)
        by_step.setdefault((number, feature), {})[name] = tensor
    steps = feature_steps(registry, registry.dataset.schema())
    for number, plugin in to_load:
        claimed = [feature for feature, chain in steps.items() if plugin in chain]
        of = (
            dict.fromkeys(claimed, "") if plugin.fits_together else {each: each for each in claimed}
        )
        if {(number, name) for name in of.values()} != {key for key in by_step if key[0] == number}:
            continue
        plugin.fitted = {
            feature: _loaded(plugin, feature, by_step[number, name]) for feature, name in of.items()
        }


def _loaded(plugin: Preprocessing, feature: str, state: Mapping[str, Tensor]) -> Preprocessing:
    step = plugin if plugin.fits_together else type(plugin)(plugin.options).placed(plugin.stands_at)
    with step_call(step, f"load_fitted_state of {feature}"):
        step.load_fitted_state(state)
    return step


def _entries(registry: RunConfig) -> Iterator[tuple[int, Entry[Preprocessing]]]:
    """Those that are fitted and say what they were fitted to be, with their numbers."""
    for number, entry in enumerate(registry.preprocessing):
        if type(entry.plugin).fitted_state is not Preprocessing.fitted_state:
            yield number, entry
