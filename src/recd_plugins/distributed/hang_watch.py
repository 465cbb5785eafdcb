"""Says who waits for whom where ranks get no further, and ends a run that does not go on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from recd_plugins.distributed.heartbeat import Beat, Ticks, key
from recd_plugins.errors import SetupError
from recd_plugins.processes import is_stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# Looks and beats in the time after which something is said.
_LOOKS = 10
_MOST_SECONDS_BETWEEN_LOOKS = 5.0
# Of that time: a rank that gave no sign for so long is said not to answer.
_SILENCE = 0.25
# What a rank does for the step that comes; all else is between two steps, or after the last one.
_IN_A_STEP = ("training", "reading data")
_OF_A_STEP = (*_IN_A_STEP, "starting")
# What collectives wait at least, and at most: some clocks of theirs count milliseconds in 31 bits.
_LEAST, _MOST = timedelta(minutes=30), timedelta(days=7)
# Of the timeout: they fail after it, as they have less to say.
_LONGER = 1.2


class HangError(SetupError):
    """Ranks got no further for longer than the run allows."""


@dataclass(frozen=True)
class HangLimits:
    """How long nothing may move.

    Attributes:
        notice: seconds after which it is said who waits for whom; again after twice as many, and
            so on.
        timeout: seconds after which the run ends; None for never.
        advice: how to go on after that, asked for then.
        setting: where the timeout is from, for messages.
    """

    notice: float
    timeout: float | None
    advice: Callable[[], str]
    setting: str = "training.hang_timeout"

    @property
    def interval(self) -> float:
        """Seconds between two looks, and between two beats."""
        soonest = min(self.notice, self.timeout or self.notice)
        return min(soonest / _LOOKS, _MOST_SECONDS_BETWEEN_LOOKS)

    @property
    def collectives(self) -> timedelta:
        """How long a collective waits for other ranks."""
        seconds = min(_LONGER * (self.timeout or 0.0), _MOST.total_seconds())
        return max(timedelta(seconds=seconds), _LEAST)


class HangWatch:
    """Looks at the beats of all ranks; one that moves means that the run does.

    A rank is quiet while it is at the same activity, and the run while all are. What may take long,
    as a first step or a checkpoint, is told too, but ends no run by itself.

    Args:
        store: that the ranks' beats are in.
        limits: how long nothing may move.
        say: takes a line for the user.
        processes: of the ranks, where they are on this machine and known before they beat.
    """

    def __init__(
        self,
        store: TCPStore,
        world_size: int,
        limits: HangLimits,
        say: Callable[[str], None],
        processes: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._limits = limits
        self._say = say
        self._ticks = Ticks(limits.interval)
        self._beats = [
            Beat(0, socket.gethostname(), process, "starting", long=True, step=0, quiet=0.0)
            for process in processes
        ] or [Beat(0, "", 0, "starting", long=True, step=0, quiet=0.0) for _ in range(world_size)]
        # Seconds since the last new beat.
        self._silent = [0.0] * world_size
        self._next_notice = limits.notice
        self._told = 0.0

    @property
    def told(self) -> bool:
        """Whether it has said that nothing moves, and not yet that something does."""
        return self._told > 0

    def look(self, teller: int | None = None) -> None:
        """Say what there is to say.

        Args:
            teller: the rank that looks, of several: the first that gives signs of life speaks.

        Raises:
            HangError: nothing has moved for too long.
        """
        self._read()
        going_on = {rank: beat for rank, beat in enumerate(self._beats) if beat.what != "done"}
        if not going_on:
            return
        quiet = min(beat.quiet + self._silent[rank] for rank, beat in going_on.items())
        limits = self._limits
        if quiet < min(limits.notice, limits.timeout or limits.notice):
            if self.told:
                if teller in (None, self._first_alive(going_on)):
                    self._say(f"goes on, after {self._told:.0f} s")
                self._told, self._next_notice = 0.0, limits.notice
            return
        blamed = self._blamed(going_on)
        stuck = any(self._is_stuck(rank) for rank in blamed)
        long = any(going_on[rank].long for rank in blamed) and not stuck
        over = limits.timeout is not None and quiet >= limits.timeout and not long
        if over or quiet >= self._next_notice:
            told = self._told = quiet
            self._next_notice = max(2 * self._next_notice, told)
            speaks = teller in (None, self._first_alive(going_on))
            text = f"nothing has moved for {quiet:.0f} s: {self._story(going_on, blamed)}"
            if over:
                raise HangError(
                    f"{text}. That is longer than {limits.setting}, {limits.timeout:g} s: the run "
                    f"is ended. {limits.advice()}"
                    if speaks
                    else ""
                )
            if speaks:
                self._say(text)

    def _read(self) -> None:
        passed = self._ticks.passed()
        for rank, last in enumerate(self._beats):
            name = key(rank)
            beat = last
            if self._store.check([name]):
                beat = Beat(**json.loads(self._store.get(name)))
            self._silent[rank] = self._silent[rank] + passed if beat.number == last.number else 0.0
            self._beats[rank] = beat

    def stopped_here(self) -> list[int]:
        """Process ids of the ranks on this machine, and of their readers, that are stopped."""
        here = [beat for rank, beat in enumerate(self._beats) if self._is_here(rank)]
        known = [process for beat in here for process in (beat.process, *beat.stuck)]
        return [process for process in known if is_stopped(process)]

    def _is_here(self, rank: int) -> bool:
        return self._beats[rank].host == socket.gethostname()

    def _is_stopped(self, rank: int) -> bool:
        return self._is_here(rank) and is_stopped(self._beats[rank].process)

    def _is_lost(self, rank: int) -> bool:
        """Of a rank elsewhere. One on this machine is busy where it does not beat."""
        return not self._is_here(rank) and self._beats[rank].number > 0 and self._is_silent(rank)

    def _is_silent(self, rank: int) -> bool:
        return self._silent[rank] > _SILENCE * self._limits.notice

    def _is_stuck(self, rank: int) -> bool:
        lost = self._is_stopped(rank) or self._is_lost(rank)
        return lost or bool(self._beats[rank].stuck)

    def _first_alive(self, ranks: Iterable[int]) -> int:
        return min((rank for rank in ranks if not self._is_silent(rank)), default=0)

    def _blamed(self, beats: dict[int, Beat]) -> list[int]:
        """Those that the others wait for."""
        stuck = [rank for rank in beats if self._is_stuck(rank)]
        if stuck:
            return stuck
        outside = [rank for rank, beat in beats.items() if not beat.collective]
        if outside:
            return outside
        least = min(beat.step for beat in beats.values())
        behind = [rank for rank, beat in beats.items() if beat.step == least]
        return behind if len(behind) < len(beats) else list(beats)

    def _story(self, beats: dict[int, Beat], blamed: list[int]) -> str:
        waiting: dict[str, list[int]] = {}
        for rank, beat in beats.items():
            if rank not in blamed:
                waiting.setdefault(_where(beat), []).append(rank)
        culprits = " and ".join(self._culprit(rank, as_subject=not waiting) for rank in blamed)
        if not waiting:
            return culprits
        who = " and ".join(
            f"{_names(ranks)} wait{'s' * (len(ranks) == 1)} {where}"
            for where, ranks in waiting.items()
        )
        return f"{who} for {culprits}"

    def _culprit(self, rank: int, as_subject: bool) -> str:
        beat = self._beats[rank]
        start = f"rank {rank}" if as_subject else f"rank {rank}, which"
        process = f"process {beat.process} of {beat.host}"
        if self._is_stopped(rank):
            return f"{start} is stopped ({process}; kill -CONT {beat.process} lets it go on)"
        if self._is_lost(rank):
            return f"{start} gives no sign of life ({process})"
        if beat.collective:
            return f"{start} waits {_where(beat)}"
        text = f"{start} is {'still ' * beat.long}{beat.what}"
        if beat.step:
            in_step = beat.what in _IN_A_STEP
            text += f" in step {beat.step + 1}" if in_step else f" after step {beat.step}"
        if beat.waits_for:
            text += f" and waits for {' and '.join(beat.waits_for)}"
        for process_id in beat.stuck:
            text += f"; kill -CONT {process_id} lets it go on"
        return text


def _where(beat: Beat) -> str:
    step = f"step {beat.step + 1}" if beat.what in _OF_A_STEP else ""
    if not beat.collective:
        return f"in {step}" if step else beat.what
    names = {"backward": "the backward pass"}
    collective = names.get(beat.collective, beat.collective)
    return f"in {collective} of {step}" if step else f"in {collective} ({beat.what})"


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}"
