"""What transforms that are fitted have in common: their state is tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recd_plugins.api import PluginError, Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


class FittedPreprocessing(Preprocessing):
    """A transform by tensors that ``fit`` decides, over all rows of the training split."""

    fit_rows = None
    _state: Mapping[str, Tensor] | None = None

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The tensors.

        Raises:
            PluginError: nothing was fitted or loaded.
        """
        if self._state is None:
            raise PluginError(f"{self.name}: transform before fit")
        return self._state

    def fitted_state(self) -> Mapping[str, Tensor]:
        """What ``fit`` decided, which a checkpoint keeps."""
        return dict(self.state)

    def load_fitted_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what another one was fitted to."""
        self._state = dict(state)

    def identity(self) -> dict[str, Any]:
        if self._state is None:
            return {}
        digest = hashlib.sha256()
        for name, tensor in sorted(self._state.items()):
            digest.update(name.encode() + b"\0" + tensor.cpu().numpy().tobytes())
        return {"fitted": digest.hexdigest()[:16]}
