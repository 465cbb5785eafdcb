"""What the processes that this package starts have in common, ranks and reader workers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from multiprocessing.connection import wait

from recd_plugins.errors import RecdError


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that multiprocessing started"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def portable(error: RecdError) -> RecdError:
    """The error itself where pickle brings it across, else its message."""
    try:
        survives = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # a plugin's error may raise anything when it is made anew
        survives = False
    return error if survives else RecdError(str(error))
