"""Silences what TorchRec 1.6 to 1.9 makes torch say about TorchRec's own code.

A user can do nothing about these lines, and they hide those that matter.
"""

from __future__ import annotations

import logging
import warnings


def silence() -> None:
    """Ignore these, and only these, in this process."""
    # torchrec.distributed.model_parallel wraps the dense layers with a deprecated argument.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # torchrec.fx.tracer asks torch.fx whether it is being traced by a name that is to change.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
