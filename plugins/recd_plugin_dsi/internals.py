"""What is relied on of Ray that has no public form."""

from __future__ import annotations

from recd_plugins.api import Internal

INTERNALS = (
    Internal("ray", ("_private",), "starting of Ray on one machine"),
    Internal("ray.data", ("_internal",), "changing how many readers there are"),
    Internal(
        "ray.experimental.internal_kv",
        ("_internal_kv_del", "_internal_kv_put"),
        "seeing that a block is read again",
    ),
)
