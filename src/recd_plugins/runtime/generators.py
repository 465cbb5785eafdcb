"""Saves and restores the random number generators of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class GeneratorState(NamedTuple):
    """States of the random number generators of this process.

    The states of torch's CPU generator and of the generator of this rank's GPU are uint8
    ``[num_bytes]``; ``cuda`` is None without CUDA.
    """

    torch: Tensor
    cuda: Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> GeneratorState:
        """Return the current state of the random number generators of this process."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if in_use else None
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def put_back(self) -> None:
        """Set the random number generators of this process to this state."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state as a dict of numpy arrays, the argument of ``of_arrays``."""
        kind, key, place, has_gauss, gauss = self.numpy
        version, ints, next_gauss = self.python
        arrays = {
            "torch": self.torch.numpy(),
            f"numpy {kind}": np.asarray(key, np.uint32),
            "numpy rest": np.array([place, has_gauss, gauss], np.float64),
            f"python {version}": np.array(ints, np.uint32),
            "python rest": np.array([] if next_gauss is None else [next_gauss], np.float64),
        }
        if self.cuda is not None:
            arrays["cuda"] = self.cuda.numpy()
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GeneratorState:
        """Create the state from the result of ``arrays``.

        Raises:
            KeyError, ValueError: the arrays come from an incompatible version of numpy or Python.
        """
        place, has_gauss, gauss = arrays["numpy rest"]
        cuda = arrays.get("cuda") if torch.cuda.is_available() else None
        ints = arrays["python 3"]
        return cls(
            torch.from_numpy(arrays["torch"].copy()),
            None if cuda is None else torch.from_numpy(cuda.copy()),
            ("MT19937", arrays["numpy MT19937"], int(place), int(has_gauss), float(gauss)),
            (3, tuple(map(int, ints)), next(map(float, arrays["python rest"]), None)),
        )


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (CPU and CUDA), numpy and Python with up to 63 bits."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Save the states of torch's, numpy's and Python's generators, and restore them at the end."""
    state = GeneratorState.now()
    try:
        yield
    finally:
        state.put_back()
