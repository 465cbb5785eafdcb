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
    made = {
        f"os.system, protocol {protocol}": pickle.dumps(Call(os.system, command), protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    }
    return {
        **made,
        "eval": pickle.dumps(Call(eval, code)),
        "exec": pickle.dumps(Call(exec, code)),
        "subprocess": pickle.dumps(Call(subprocess.Popen, ["touch", str(mark)])),
        "inside a list": pickle.dumps([1, {"a": Call(os.system, command)}]),
        "an attrgetter": pickle.dumps([getter, Call(os.system, command)]),
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'" + text + b"'\ntR.",
        "opcode INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "opcode OBJ": b"(cos\nsystem\nS'" + text + b"'\no.",
        "a dotted name": b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c"
        + bytes([len(text)])
        + text
        + b"\x85R.",
        "a dotted name in a module that is allowed": b"\x80\x04\x8c\x05torch\x8c\x17serialization"
        b".os.system\x93\x8c" + bytes([len(text)]) + text + b"\x85R.",
    }


#: Pickles that name nothing bad, and are none that a checkpoint has.
ODDITIES = {
    "a persistent id": b"Psomewhere\n.",
    "an extension": b"\x82\x01.",
    "nothing": b"",
    "cut off": pickle.dumps(list(range(100)))[:-9],
    "a class and its attributes": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    b"(N(dS'__setstate__'\nI1\nstb.",
    "other values": pickle.dumps({"state_dict_metadata": {}}),
    "itself": b"]\x94h\x00a.",
}
