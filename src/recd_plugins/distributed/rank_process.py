"""What runs inside a rank of ``launch``."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from recd_plugins.distributed.heartbeat import Heart
from recd_plugins.errors import RecdError, in_a_line
from recd_plugins.lasting_output import lasting_output
from recd_plugins.processes import adopt_environ, end_with_parent, portable, share_fork_server

#: Set in the environment of a rank that ``launch`` made.
LAUNCHED = "RECD_LAUNCHED"
#: Where ranks of ``launch`` and their store are.
HOST = "127.0.0.1"


@dataclass(frozen=True)
class RankSetup:
    """What every rank of one launch is told.

    Attributes:
        port: of the store.
        beats: seconds between signs of life, where somebody watches.
    """

    world_size: int
    local_world_size: int
    backend: str
    timeout: timedelta
    threads: int
    environ: dict[str, str]
    port: int = 0
    beats: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result.

    Attributes:
        text: the traceback, empty where the process ended without a word.
        error: the exception, where it is a RecdError.
        exit_code: of the process, where it ended; negative for a signal.
        what: the exception in a line.
    """

    text: str
    error: RecdError | None
    exit_code: int | None = None
    what: str = ""


def serve(rank: int, connection: Connection, setup: RankSetup) -> None:
    """Join the process group, then answer requests until an empty one.

    A request is a pickled ``(function, args)``, an answer a pickled result or ``Failure``.
    """
    # Ctrl-C reaches the whole terminal, and so does its end; the parent ends the ranks.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A rank whose parent was killed must not go on training.
    end_with_parent()
    share_fork_server()
    adopt_environ(setup.environ)
    with lasting_output():
        try:
            _join_process_group(rank, setup)
        except Exception as error:
            _answer(connection, _failure(error))
            return
        _answer(connection, None)
        with suppress(EOFError, BrokenPipeError):  # a parent that was interrupted says no word
            while request := connection.recv_bytes():
                connection.send_bytes(_call(rank, setup, request))
        leave_process_group()


def leave_process_group() -> None:
    """Destroy the process group and end its threads, so that the interpreter can end too.

    Models and pipelines are cycles that keep their groups. A gloo thread that is still there when
    the interpreter ends asks for its lock to free tensors, is ended instead, and aborts.
    """
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()


def _join_process_group(rank: int, setup: RankSetup) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(setup.threads)
    local_rank = rank % setup.local_world_size
    if "cuda" in setup.backend:  # pretended nodes share this machine
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = TCPStore(HOST, setup.port, is_master=False, timeout=setup.timeout)
    os.environ.update(
        {
            LAUNCHED: "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(setup.local_world_size),
            "GROUP_RANK": str(rank // setup.local_world_size),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(setup.port),
            "OMP_NUM_THREADS": str(setup.threads),
        }
    )
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=rank,
        world_size=setup.world_size,
        timeout=setup.timeout,
    )


def _call(rank: int, setup: RankSetup, request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        with nullcontext() if setup.beats is None else Heart(rank, setup.beats):
            return pickle.dumps(function(rank, setup.world_size, *args))
    except BaseException as error:
        return pickle.dumps(_failure(error))


def _answer(connection: Connection, answer: Any) -> None:
    # Not connection.send: torch would pass tensors as handles, which die with the rank.
    connection.send_bytes(pickle.dumps(answer))


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    known = portable(error) if isinstance(error, RecdError) else None
    return Failure(text, known, what=in_a_line(error))
