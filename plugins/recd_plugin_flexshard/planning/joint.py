"""The best tiers under any budget: two cuts, found exactly."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from recd_plugin_flexshard.planning.cuts import CutModel, Cuts, clip
from recd_plugin_flexshard.planning.ranking import Prefix

# Cuts of whole rows are not quite where those of fractions of rows are: so many are tried on
# either side.
_TRIED = 12
# And so many of all, evenly on a logarithmic scale.
_SPREAD = 16


def joint(model: CutModel) -> Cuts:
    """The cuts that take the least time, or send the fewest bytes, within the budget.

    Tiers are intervals in how often a row is sent: where two rows are in tiers of unlike costs of
    an access, it is best that the one that is sent more is in the one that costs less. So two cuts
    are enough, and where tables have one dimension no other assignment of rows is better. Where
    they have several, one may be, by less than a row. Of equals the cuts that take less memory.

    With a sparse sync what a row's gradient takes is concave in how often the row is sent, and what
    the row takes as a cold one is linear. So where a copy pays for a row it pays for all that are
    sent more, as with dense syncs. Between hot and flex rows both are concave, and their difference
    may change its sign more than once, where two cuts need not be the best. Each pair of syncs is
    sought by itself: in it a row costs the same whatever the cuts are.
    """
    return model.best(cuts for each in model.with_each_syncs for cuts in _candidates(each))


def _candidates(model: CutModel) -> Iterator[Cuts]:
    """The best cuts for each choice of tiers: with latencies, fewer tiers can be better."""
    fewest, most = model.hot_that_fit
    for hot in (model.two_tier().hot, fewest, most):
        yield Cuts(hot, hot)
    if model.cluster.nodes == 1:
        return
    last = model.ranking.above(model.comm_flex_rw)
    yield model.most_flex(fewest, last)
    best = _best_hot(model, last)
    first = max(fewest.num_rows, best.num_rows - _TRIED)
    for num_rows in range(first, min(most.num_rows, best.num_rows + _TRIED) + 1):
        yield model.most_flex(model.ranking.first(num_rows), last)
    if model.syncs is not None and model.syncs.sparse:
        # Where what hot rows save of flex ones has no single end, bisection may find another.
        for hot_rows in _spread(fewest.num_rows, most.num_rows):
            yield model.most_flex(model.ranking.first(hot_rows), last)
    if model.hot_beside_flex is not None:
        everything = model.ranking.everything
        for sent in (model.comm_dp_flex, inf):
            hot = clip(model.ranking.above(sent), model.hot_beside_flex)
            yield Cuts(hot, everything)


def _spread(first: int, last: int) -> list[int]:
    return sorted({first + round((last - first) ** (n / _SPREAD)) for n in range(_SPREAD)})


def _best_hot(model: CutModel, last: Prefix) -> Prefix:
    """The data-parallel rows that are best with all flex rows that memory allows, up to ``last``.

    What they save is concave in their number: each further row saves less, and takes more of the
    memory, whose worth is what the flex row saves that it has room for. So bisection finds the end.
    """
    costs, ranking = model.costs, model.ranking
    fewest, most = model.hot_that_fit

    def pays(hot: Prefix) -> bool:
        if hot.num_rows <= fewest.num_rows or hot.num_rows > most.num_rows:
            return hot.num_rows <= fewest.num_rows
        sent = ranking.last_key(hot)
        if hot.num_rows > last.num_rows:
            return sent * costs.a2a_global >= model.hot_seconds(sent)
        flex = model.most_flex(hot, last).flex
        seconds = model.flex_seconds(sent) - model.hot_seconds(sent) + sent * costs.a2a_intra
        memory = costs.flex_static - costs.hot_static + sent * costs.saved
        return seconds + memory * _worth_of_a_byte(model, flex, last) >= 0

    return ranking.longest(pays)


def _worth_of_a_byte(model: CutModel, flex: Prefix, last: Prefix) -> float:
    """Seconds that more memory saves, a byte of it with room for flex rows after ``flex``."""
    if flex.num_rows >= last.num_rows:
        return 0.0
    costs = model.costs
    sent = model.ranking.next_key(flex)
    saved = (costs.a2a_global - costs.a2a_intra) * sent - model.flex_seconds(sent)
    return saved / (costs.flex_static - costs.row_wise_static)
