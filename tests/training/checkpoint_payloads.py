"""Pickles that run a command as they are unpickled, each in another way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def payloads(mark: Path) -> dict[str, bytes]:
    """Each makes the file ``mark`` where it is unpickled."""
    import operator
    import os
    import subprocess

    command = f"touch {mark}"
    text = command.encode()
    code = f"__import__('os').system({command!r})"
    getter = Call(operator.attrgetter, "system")
    return {
        "os.system": pickle.dumps(Call(os.system, command)),
        "os.system, protocol 0": pickle.dumps(Call(os.system, command), 0),
        "eval": pickle.dumps(Call(eval, code)),
        "subprocess": pickle.dumps(Call(subprocess.Popen, ["touch", str(mark)])),
        "an attrgetter": pickle.dumps([getter, Call(os.system, command)]),
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'" + text + b"'\ntR.",
        "opcode INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "a dotted name in a module that is allowed": b"\x80\x04\x8c\x05torch\x8c\x17serialization"
        b".os.system\x93\x8c" + bytes([len(text)]) + text + b"\x85R.",
    }


#: Pickles that name nothing bad, and are none that a checkpoint has.
ODDITIES = {
    "nothing": b"",
    "cut off": pickle.dumps(list(range(100)))[:-9],
    "a class and its attributes": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    b"(N(dS'__setstate__'\nI1\nstb.",
    "other values": pickle.dumps({"state_dict_metadata": {}}),
}
