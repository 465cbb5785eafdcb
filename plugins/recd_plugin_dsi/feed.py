"""Receives batches from readers on Ray, and adjusts the number of readers (autoscaling)."""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from recd_plugin_dsi.cluster import join
from recd_plugin_dsi.helper import Helper, receive_block
from recd_plugin_dsi.options import RayOptions
from recd_plugins.api import (
    Feed,
    ModelInput,
    Reader,
    SetupError,
    doing,
    feeds,
    ipc,
    reader_workers,
    stall_meter,
)

# Readers are removed if the trainer waits for less than this fraction of the target share.
_FAR_BELOW = 0.25
# Keep at least this many readers per needed reader when removing one.
_MARGIN = 1.25


@dataclass
class Window:
    """Sums of step times since the number of readers last changed.

    Attributes:
        steps: number of training steps.
        seconds: wall time of these steps.
        waited: seconds that the trainer waited for batches.
        making: seconds that readers spent on the batches of these steps.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    making: float = 0.0

    @property
    def share(self) -> float:
        """Return the fraction of time that the trainer waited for batches, 0 to 1."""
        return self.waited / self.seconds if self.seconds else 0.0

    def measured(self, batches: Iterator[ModelInput]) -> Iterator[ModelInput]:
        """Yield ``batches`` unchanged, and add the times of each step to this window."""
        meter = stall_meter.StallMeter()
        handed_out: float | None = None
        for batch in meter.metered(batches):
            assert meter.newest is not None
            now = time.perf_counter()
            if handed_out is not None:
                self.steps += 1
                self.seconds += now - handed_out
                self.waited += meter.clock.seconds(meter.newest.start, meter.newest.end)
                self.making += batch.making.reader
            handed_out = now
            yield batch

    def clear(self) -> None:
        """Reset all sums."""
        self.steps, self.seconds, self.waited, self.making = 0, 0.0, 0.0, 0.0


def wanted(window: Window, readers: int, bounds: tuple[int, int], target: float) -> int:
    """Return the number of readers for the next steps (arXiv 2108.09373, section 3.2).

    If the trainer waits more than ``target``, the number grows by at least one, and at most
    doubles. If the trainer waits much less, one reader may be removed.

    Args:
        window: times of the last steps. ``making / (seconds - waited)`` readers would be enough.
        readers: current number of readers.
        bounds: minimum and maximum number of readers.
        target: fraction of time that the trainer may wait, 0 to 1.
    """
    low, high = bounds
    busy = max(window.seconds - window.waited, 1e-9)
    if window.share > target:
        enough = math.ceil(window.making / busy)
        return min(high, max(readers + 1, min(enough, 2 * readers)))
    needed = math.ceil(_MARGIN * window.making / busy)
    if window.share < _FAR_BELOW * target and needed < readers:
        return max(low, readers - 1)
    return readers


class RayFeed(Feed):
    """Receives blocks of batches from a feeder process, which communicates with Ray.

    Messages to the feeder: ``start``, ``read`` (position, number of blocks, readers), ``taken`` (a
    block was received) and ``readers`` (a new number of readers). Messages from the feeder:
    ``ready``, ``block``, ``scaled`` (number of readers changed), ``done``, and for errors
    ``failed``, ``died``, ``lost`` and ``raised``.
    """

    def __init__(self, task: feeds.ReadTask, options: RayOptions) -> None:
        self._options = options
        self._rank = task.rank
        self._task = pickle.dumps(task)
        self._readers = self._most_readers = options.bounds[0]
        self._told_full = False
        self._deaths = self._blocks_received = self._bytes_received = 0
        # Whether a requested change of the number of readers is still in progress.
        self._scaling = False
        self._window = Window()
        self._feeder: Helper | None = None
        self._reading = False
        self._cluster = join(options, task.world_size)
        try:
            self._feeder = self._start_feeder()
        except BaseException:
            self.close()
            raise

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield the batches of an epoch from the reader's position. Autoscales the readers."""
        num_blocks = reader.num_blocks()
        self._window.clear()
        with closing(self._blocks(reader.state_dict(), num_blocks)) as blocks:
            for model_input in self._window.measured(reader_workers.hand_out(blocks, reader)):
                yield model_input
                if num_blocks is not None:
                    self._autoscale()

    def report(self) -> Mapping[str, float]:
        """Return a dict with counts of readers, dead readers, received blocks and bytes."""
        return {
            "readers": self._readers,
            "most readers": self._most_readers,
            "readers that died": self._deaths,
            "blocks received": self._blocks_received,
            "bytes received": self._bytes_received,
        }

    def close(self) -> None:
        """Stop the feeder process and leave the Ray cluster."""
        self._end_feeder()
        self._cluster.leave()

    def _blocks(
        self, position: feeds.State, num_blocks: int | None
    ) -> Generator[feeds.BatchBlock, None, None]:
        # A read that ends early stops the feeder; the next read starts another.
        if self._reading:
            self._end_feeder()
        feeder = self._feeder = self._feeder or self._start_feeder()
        self._reading, self._scaling = True, False
        feeder.send("read", position=position, num_blocks=num_blocks, readers=self._readers)
        timeout: float | None = self._options.start_timeout
        try:
            while (message := self._receive(feeder, timeout))[0] != "done":
                kind, fields = message
                if kind == "scaled":
                    if self._scaling:  # otherwise requested in the previous read
                        self._scaled(**fields)
                    continue
                timeout = None  # later blocks may be slow; a lost cluster is detected anyway
                start = time.perf_counter()
                data = receive_block(feeder.connection, fields["size"])
                feeder.send("taken")
                block: feeds.BatchBlock = ipc.decode(data)
                self._count(**fields)
                yield block.moved(fields["packing"], time.perf_counter() - start)
                if self._feeder is not feeder:
                    raise RuntimeError(
                        "dsi.ray: this iterator is no longer valid, because the data loader was "
                        "iterated again or closed. Use the newest iterator."
                    )
            self._reading = False
        except TimeoutError:
            raise SetupError(
                f"dsi.ray: rank {self._rank} received no batch from Ray at {self._cluster.address} "
                f"within {timeout:.0f} s. Check with `ray status` that the cluster has free CPUs, "
                "or raise option 'start_timeout'."
            ) from None
        finally:
            if self._reading and self._feeder is feeder:
                self._end_feeder()

    def _receive(self, feeder: Helper, timeout: float | None) -> tuple[str, dict[str, Any]]:
        try:
            processes = {"the process that communicates with Ray": feeder.pid}
            with doing("reading data", processes=processes):
                kind, fields = feeder.receive(timeout, needed=self._cluster.host)
        except EOFError as error:
            raise self._lost(str(error)) from None
        if kind == "lost":
            raise self._lost(fields["message"])
        if kind == "died":
            raise SetupError(
                f"dsi.ray: readers of rank {self._rank} died {self._options.deaths + 1} times on "
                "the same batches, probably because memory ran out. Reduce option 'readers', "
                "training.batch_size or the size of row groups. Ray reports: "
                f"{fields['message'].strip().partition(chr(10))[0]}"
            )
        if kind == "raised":
            raise RuntimeError(
                f"dsi.ray: a reader of rank {self._rank} raised this error:\n{fields['message']}"
            )
        if kind == "failed":
            raise SetupError(
                f"dsi.ray: rank {self._rank} could not connect to Ray at {self._cluster.address}. "
                f"Check that Ray runs there. Ray reports: {fields['message']}"
            )
        return kind, fields

    def _lost(self, message: str) -> SetupError:
        return SetupError(
            f"dsi.ray: rank {self._rank} lost its connection to Ray at {self._cluster.address}. "
            "Restart Ray, then resume from the last checkpoint with recd run --resume. "
            f"Ray reports: {message}"
        )

    def _start_feeder(self) -> Helper:
        options, address = self._options, self._cluster.address
        feeder = Helper(
            "recd_plugin_dsi.feeder",
            self._cluster.token,
            # By default Ray retries forever when memory runs out.
            RAY_task_oom_retries=str(options.deaths),
        )
        try:
            feeder.send(
                "start",
                address=address,
                task=self._task,
                cpus_per_reader=options.cpus_per_reader,
                memory=options.memory_bytes,
                deaths=options.deaths,
            )
            _, fields = self._receive(feeder, options.start_timeout)
            least, ranks = options.bounds[0], self._cluster.ranks
            needed, cpus = least * ranks * options.cpus_per_reader, fields["cpus"]
            if needed > cpus:
                raise SetupError(
                    f"dsi.ray: {least} readers for each of {ranks} ranks need {needed:g} CPUs, but "
                    f"the Ray cluster has {cpus:g}. Reduce option 'readers', 'min_readers' or "
                    "'cpus_per_reader', or add machines."
                )
        except TimeoutError:
            feeder.end()
            raise SetupError(
                f"dsi.ray: rank {self._rank} could not connect to Ray at {address} within "
                f"{options.start_timeout:.0f} s. Run `ray start` on this machine, too."
            ) from None
        except BaseException:
            feeder.end()
            raise
        return feeder

    def _end_feeder(self) -> None:
        self._reading = False
        if self._feeder is not None:
            self._feeder.end()
            self._feeder = None

    def _count(self, size: int, process: int, again: bool, **_: object) -> None:
        self._blocks_received += 1
        self._bytes_received += size
        if again:
            self._deaths += 1
            self._say(
                f"a reader process died. Process {process} has read its rows again, so no row is "
                "lost"
            )

    def _autoscale(self) -> None:
        options, window = self._options, self._window
        low, high = options.bounds
        if low == high or window.steps < options.stall_window or self._feeder is None:
            return
        waited = (
            f"the trainer waited for batches for {window.share:.0%} of the time "
            f"of the last {window.steps} steps"
        )
        target = wanted(window, self._readers, options.bounds, options.stall_target)
        stalled = window.share > options.stall_target
        window.clear()
        if self._scaling:
            return
        if target != self._readers:
            self._say(f"{waited}. The number of readers changes from {self._readers} to {target}")
            self._feeder.send("readers", readers=target)
            self._scaling = True
        elif target == high and stalled:
            self._say_once(
                f"{waited}, although max_readers ({high}) readers run. Raise max_readers"
            )

    def _scaled(self, readers: int, asked: int, cpus: float) -> None:
        self._readers, self._scaling = readers, False
        self._most_readers = max(self._most_readers, readers)
        self._window.clear()
        if readers < asked:
            self._say_once(
                f"the Ray cluster has CPUs for {readers} of {asked} readers: {cpus:g} CPUs, "
                f"{self._options.cpus_per_reader:g} per reader. Add machines, or lower "
                "cpus_per_reader"
            )

    def _say_once(self, why: str) -> None:
        if not self._told_full:
            self._told_full = True
            self._say(why)

    def _say(self, what: str) -> None:
        print(f"dsi.ray, rank {self._rank}: {what}", file=sys.stderr)
