"""Evaluations of choices, each made once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from recd_plugin_tuning.groups import Group, offered
from recd_plugins.api import Candidate, Evaluation, Offered, SearchContext

#: The offer of each group, None where its tables are left to the planner.
Choices = tuple[Candidate | None, ...]


class Evaluations:
    """Evaluations of choices, each made once.

    Args:
        question: that makes them.
        groups: of its tables.
    """

    def __init__(self, question: SearchContext, groups: Sequence[Group]) -> None:
        self._question = question
        self._groups = groups
        self._made: dict[Choices, Evaluation] = {}
        self._settled: set[Choices] = set()

    @property
    def made(self) -> Mapping[Choices, Evaluation]:
        """Those that were made."""
        return self._made

    def __call__(self, choices: Choices) -> Evaluation:
        """The trial of one offer a group, made in haste.

        Raises:
            PluginError: a plugin failed.
        """
        if choices not in self._made:
            self._made[choices] = self._trial(choices, fast=True)
        return self._made[choices]

    def settle(self, choices: Choices) -> bool:
        """Whether a trial is of the plan that training makes; from now on it is."""
        if settled := choices in self._settled:
            return settled
        self._settled.add(choices)
        self._made[choices] = self._trial(choices)
        return settled

    def seconds_without(self, choices: Choices, numbers: Collection[int]) -> float:
        """Seconds of the step without the tables of some groups, of choices that have a plan."""
        left_out = frozenset(name for number in numbers for name in self._groups[number].names)
        return self(choices).without(left_out).total

    def _trial(self, choices: Choices, *, fast: bool = False) -> Evaluation:
        trial = self._question.evaluate(self._offered(choices), fast=fast)
        without = cache(trial.without)  # the search asks for the same tables again and again
        return replace(trial, without=lambda names: without(frozenset(names)))

    def _offered(self, choices: Choices) -> Offered:
        return offered(zip((group.names for group in self._groups), choices, strict=True))
