"""``auto``: what takes the shortest predicted step, of all that other shardings offer."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Choice, Chooser, SearchContext, Sharding, hookimpl

REQUIRES_API = 4


class Auto(Chooser):
    """Of what installed plugins offer, by tables, what takes the shortest predicted step."""

    name = "auto"

    def choose(self, question: SearchContext) -> Choice:
        """Search from all tables left to the planner."""
        from recd_plugin_tuning.chosen import chosen
        from recd_plugin_tuning.groups import groups_of
        from recd_plugin_tuning.search import best_choices
        from recd_plugin_tuning.trials import Evaluations

        groups = groups_of(question)
        trials = Evaluations(question, groups)
        best = best_choices(trials, groups)
        if trials(best).seconds is None:
            error = trials((None,) * len(groups)).error
            assert error is not None, "the search starts there"
            raise error
        return chosen(trials, groups, best, question)


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    return [Auto]
