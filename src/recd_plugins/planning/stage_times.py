"""Seconds of a step by stage, predicted from its work."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.errors import SetupError
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.values.stages import STAGES, StageTimes
from recd_plugins.values.work import Work

#: Bytes a second of a file whose rows are read in random order: an assumption, 1 GiB/s.
FILE_BYTES_PER_SECOND = float(2**30)
# Of the collectives of a sharding, outputs and gradients have nearly all the bytes.
_CARRYING = 1 / 2


def check_some_time(step: StageTimes) -> StageTimes:
    """A predicted step that takes some time: without any there are no speeds and no ratios.

    Raises:
        SetupError: it takes none, as costs that are given in part may have it.
    """
    if step.total > 0:
        return step
    raise SetupError(
        "the costs of the topology come to 0 seconds for a step, by which nothing can be compared: "
        "give what a step spends its time on (recd calibrate measures it), or leave the section "
        "costs out, for the least times by its bandwidths"
    )


def predict_stages(
    works: Sequence[Work], costs: StageCosts, *, overlapped: bool = False
) -> StageTimes:
    """Seconds of a step by stage, the mean over its ranks.

    Ranks whose own work is done wait for the others in the all-to-all; that counts there.

    Args:
        works: of all ranks.
        costs: of the machine.
        overlapped: whether gradients of dense layers are summed while tables learn and rows of the
            next batch are looked up.
    """
    ranks = [
        StageTimes(**{stage: getattr(costs, stage).seconds(work) for stage in STAGES})
        for work in works
    ]
    mean = StageTimes.mean(ranks)
    own = [rank.lookup + rank.gemm + rank.other for rank in ranks]
    # As a mean of differences, so that ranks with equal work wait for exactly 0 seconds.
    all_done = _all_done(own, costs.alone)
    waiting = sum(all_done - seconds for seconds in own) / len(own)
    # Processors that the ranks share have no time left while they compute.
    hidden = costs.hidden * min(mean.all_reduce, mean.lookup) if overlapped else 0.0
    collectives = max(work.collectives for work in works)
    # A link that has more to carry than others does so at its own rate, and all wait for it.
    each = [costs.all_to_all.bytes_across_nodes * work.bytes_across_nodes for work in works]
    even = sum(each) / len(each)
    # Where it is processors that carry bytes, ranks that wait leave theirs to the one that sends.
    left = (1 - costs.idle_links) * (1 - costs.alone)
    waited_for = [costs.all_to_all.bytes_waited_for * work.bytes_waited_for for work in works]
    sent = even + (1 - left) * max(waited_for)
    all_to_all = even + max(
        rank.all_to_all - part - left * most
        for rank, part, most in zip(ranks, each, waited_for, strict=True)
    )
    reduced = mean.all_reduce - hidden
    let_through = (
        min(costs.spared * collectives * _CARRYING, sent),
        min(costs.spared, max(0.0, reduced - costs.all_reduce.steps)),
    )
    first_bytes = (costs.all_to_all.collectives * collectives, costs.all_reduce.steps)
    latencies = sum(first_bytes)
    # Ranks that share processors compute while others wait, but for when all of them wait at once.
    waited = costs.idle * latencies + costs.idle_links * sent
    # Of works that parts bring to some ranks alone, these wait for more than the mean has.
    all_wait = min(1.0, waited / mean.total) if waited else 1.0
    together = all_wait ** (1 / costs.alone - 1)
    filled = costs.idle * (1 - together)
    computing = sum(own) / len(own) - hidden + latencies * (1 - filled)
    beside = min(costs.idle_links * (1 - together) * sent, (1 - costs.alone) * computing)
    # No link lets more through than it could have carried while it had nothing to.
    idle = computing - beside
    share = costs.hidden * min(1.0, idle / total) if (total := sum(let_through)) else 0.0
    saved = min(sent, share * let_through[0] + beside)
    return StageTimes(
        lookup=mean.lookup,
        gemm=mean.gemm,
        all_to_all=all_to_all + waiting - saved - filled * first_bytes[0],
        all_reduce=max(0.0, reduced - share * let_through[1] - filled * first_bytes[1]),
        other=mean.other,
    )


def _all_done(own: Sequence[float], alone: float) -> float:
    """Seconds until all ranks have done their own work.

    Args:
        own: of each, while the others work too.
        alone: the share of it that a rank takes by itself: whose processors it shares leave them
            to it when they are done.
    """
    seconds = before = 0.0
    for done, work in enumerate(sorted(own)):
        seconds += (work - before) * max(alone, 1 - done / len(own))
        before = work
    return seconds
