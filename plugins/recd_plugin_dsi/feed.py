"""Batches of one rank from readers on Ray."""

from __future__ import annotations

import mmap
import pickle
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from recd_plugin_dsi.autoscale import Waits, Window, wanted
from recd_plugin_dsi.cluster import join
from recd_plugin_dsi.helper import Helper, receive_block
from recd_plugin_dsi.options import RayOptions
from recd_plugin_dsi.standby import Standby, keep, place_of, take
from recd_plugins.api import (
    BatchBlock,
    Feed,
    ModelInput,
    Reader,
    ReadTask,
    SetupError,
    State,
    decode,
    doing,
    hand_out,
)

# Of a read that was left: for the block that is in the making.
_STOP_SECONDS = 30.0


class RayFeed(Feed):
    """Tells a process that speaks to Ray what to read, and takes the blocks that it sends.

    To it go ``start`` (address), ``open`` (what this feed reads), ``read`` (position, number of
    blocks, readers), ``taken`` (a block), ``stop``, and ``readers`` (how many); from it come
    ``ready``, ``block``, ``scaled``, ``done``, and where it went wrong ``failed``, ``died``,
    ``lost`` and ``raised``.
    """

    def __init__(self, task: ReadTask, options: RayOptions) -> None:
        self._options = options
        self._rank = task.rank
        self._task = pickle.dumps(task)
        self._readers = self._most_readers = options.bounds[0]
        self._told_full = False
        self._deaths = 0
        self._blocks_received = 0
        self._bytes_received = 0
        # Of a number of readers that was asked for: whether it is not yet so, and which readers
        # others have to join before it is measured what the number does.
        self._scaling = False
        self._awaited: set[int] | None = None
        self._processes: set[int] = set()
        self._feeder: Helper | None = None
        # The read that the feeder is at; None between two.
        self._current: object = None
        self._place = place_of(options, task.world_size)
        standby = take(options, task.world_size)
        if standby is not None:
            self._cluster, self._feeder = standby.cluster, standby.feeder
        else:
            self._cluster = join(options, task.world_size)
        try:
            self._open_feeder()
        except BaseException:
            self.close()
            raise

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """See ``Feed.read``; adds and removes readers meanwhile, where the options say so."""
        num_blocks = reader.num_blocks()
        waits = Waits()
        with closing(self._blocks(reader.state_dict(), num_blocks)) as blocks:
            for model_input in waits.measured(hand_out(blocks, reader)):
                yield model_input
                if num_blocks is not None:
                    self._autoscale(waits)

    def report(self) -> Mapping[str, float]:
        """See ``Feed.report``."""
        return {
            "readers": self._readers,
            "most readers": self._most_readers,
            "readers that died": self._deaths,
            "blocks received": self._blocks_received,
            "bytes received": self._bytes_received,
        }

    def close(self) -> None:
        """See ``Feed.close``; what is idle stays for the next feed of this process."""
        feeder, self._feeder = self._feeder, None
        if feeder is None:
            self._cluster.leave()
            return
        standby = Standby(self._place, self._cluster, feeder)
        if self._current is not None or not keep(standby):
            standby.end()
        self._current = None

    def _blocks(self, position: State, num_blocks: int | None) -> Generator[BatchBlock, None, None]:
        if self._feeder is not None and self._current is not None:
            self._stop(self._feeder)  # of an iteration that was left, and not closed
        feeder = self._feeder or self._open_feeder()
        self._current = current = object()
        self._scaling = False
        feeder.send("read", position=position, num_blocks=num_blocks, readers=self._readers)
        timeout: float | None = self._options.start_timeout
        try:
            while (message := self._receive(feeder, timeout))[0] != "done":
                kind, fields = message
                if kind == "scaled":
                    if self._scaling:  # else of the read before, and undone
                        self._scaled(**fields)
                    continue
                timeout = None  # later blocks may be slow, and a lost cluster shows
                start = time.perf_counter()
                block: BatchBlock = decode(self._take(feeder, fields["size"]))
                self._count(**fields)
                yield block.moved(fields["packing"], time.perf_counter() - start)
                if self._current is not current:
                    raise RuntimeError("this iteration was left: the feed is read anew, or closed")
            self._current = None
        except TimeoutError:
            self._end_feeder()
            raise SetupError(
                f"no batch of rank {self._rank} within {timeout:.0f} s from Ray at "
                f"{self._cluster.address}: do others use its CPUs (`ray status` shows it)? Where "
                "readers take so long, raise start_timeout"
            ) from None
        except GeneratorExit:
            if self._current is current:
                self._stop(feeder)
            raise
        except BaseException:
            if self._current is current:
                self._end_feeder()
            raise

    def _stop(self, feeder: Helper) -> None:
        """The rest of a read that was left is thrown away; its readers are ready for the next."""
        self._current = None
        feeder.send("stop")
        with suppress(SetupError, RuntimeError, TimeoutError):
            while (message := self._receive(feeder, _STOP_SECONDS))[0] != "done":
                if message[0] == "block":
                    self._take(feeder, message[1]["size"]).close()
            return
        self._end_feeder()

    def _take(self, feeder: Helper, size: int) -> mmap.mmap:
        block = receive_block(feeder.connection, size)
        feeder.send("taken")
        return block

    def _receive(self, feeder: Helper, timeout: float | None = None) -> tuple[str, dict[str, Any]]:
        try:
            processes = {"the process that speaks to Ray": feeder.pid}
            with doing("reading data", processes=processes):
                kind, fields = feeder.receive(timeout, needed=self._cluster.host)
        except EOFError as error:
            raise self._lost(str(error)) from None
        if kind == "lost":
            raise self._lost(fields["message"])
        if kind == "died":
            raise SetupError(
                f"readers of rank {self._rank} died {self._options.deaths + 1} times over the same "
                "block of batches. Where nobody killed them, a reader needs more memory than there "
                "is: lower readers, training.batch_size or the size of row groups, or read with "
                f"workers to see the error. {_first_line(fields['message'])}"
            )
        if kind == "raised":
            raise RuntimeError(f"a reader of rank {self._rank} raised\n{fields['message']}")
        if kind == "failed":
            raise SetupError(f"rank {self._rank} cannot join Ray: {fields['message']}")
        return kind, fields

    def _lost(self, message: str) -> SetupError:
        return SetupError(
            f"rank {self._rank} lost Ray at {self._cluster.address}, as when its node or its head "
            f"ends; training.checkpoint and --resume go on from where it was. {message}"
        )

    def _start_feeder(self) -> Helper:
        feeder = Helper(
            "recd_plugin_dsi.feeder",
            self._cluster.token,
            # Those that Ray ends as memory runs out; by itself it tries for ever.
            RAY_task_oom_retries=str(self._options.deaths),
        )
        feeder.send("start", address=self._cluster.address)
        return feeder

    def _open_feeder(self) -> Helper:
        options = self._options
        self._feeder = feeder = self._feeder or self._start_feeder()
        feeder.send(
            "open",
            task=self._task,
            cpus_per_reader=options.cpus_per_reader,
            memory=options.memory_bytes,
            deaths=options.deaths,
        )
        try:
            kind, fields = self._receive(feeder, options.start_timeout)
            while kind != "ready":  # "scaled", which the feed before has left
                kind, fields = self._receive(feeder, options.start_timeout)
        except TimeoutError:
            self._end_feeder()
            raise SetupError(
                f"rank {self._rank} did not reach Ray at {self._cluster.address} within "
                f"{options.start_timeout:.0f} s; is it `ray start`ed on this machine, too?"
            ) from None
        except BaseException:
            self._end_feeder()
            raise
        least, ranks = options.bounds[0], self._cluster.ranks
        needed, cpus = least * ranks * options.cpus_per_reader, fields["cpus"]
        if needed > cpus:
            raise SetupError(
                f"{least} readers of each of {ranks} ranks take {needed:g} CPUs, and Ray has "
                f"{cpus:g}: lower readers (or min_readers) or cpus_per_reader, or add machines"
            )
        return feeder

    def _end_feeder(self) -> None:
        self._current = None
        if self._feeder is not None:
            self._feeder.end()
            self._feeder = None

    def _count(self, size: int, process: int, again: bool, **_: object) -> None:
        self._blocks_received += 1
        self._bytes_received += size
        self._processes.add(process)
        if again:
            self._deaths += 1
            self._say(f"a reader died, and reader {process} made its block anew; no row is lost")

    def _autoscale(self, waits: Waits) -> None:
        options, window = self._options, waits.window
        low, high = options.bounds
        if low == high or window.steps < options.stall_window or self._feeder is None:
            return
        waits.window = Window()
        if self._scaling:
            return
        if self._awaited is not None:
            new, self._awaited = self._processes - self._awaited, None
            if not new and window.share > options.stall_target:
                return
        target = wanted(window, self._readers, options.bounds, options.stall_target)
        if target == self._readers == high and window.share > options.stall_target:
            self._say_once(
                f"waited {window.share:.0%} of {window.steps} steps for batches of {high} readers, "
                "the most that max_readers allows"
            )
        if target != self._readers:
            self._say(
                f"waited {window.share:.0%} of {window.steps} steps for batches: "
                f"{self._readers} -> {target} readers"
            )
            self._feeder.send("readers", readers=target)
            self._scaling, self._awaited = True, set(self._processes)

    def _scaled(self, readers: int, asked: int, cpus: float) -> None:
        self._readers, self._scaling = readers, False
        self._most_readers = max(self._most_readers, readers)
        if readers < asked:
            self._say_once(
                f"{readers} readers it is: Ray has no more cores ({cpus:g} CPUs in all, "
                f"{self._options.cpus_per_reader:g} a reader). Add machines, or lower "
                "cpus_per_reader"
            )

    def _say_once(self, what: str) -> None:
        """One line of why there are no more readers."""
        if not self._told_full:
            self._told_full = True
            self._say(what)

    def _say(self, what: str) -> None:
        print(f"dsi.ray, rank {self._rank}: {what}", file=sys.stderr)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
