"""Deduplicated or plain: the form of the batches that a sharded module gets."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.errors import ExactnessError

_FORMS = {
    False: "plain",
    True: "deduplicated (a KeyedJaggedTensor with stride_per_key_per_rank)",
}


class BatchForm:
    """The one form of a module's batches, which is that of its first.

    TorchRec (1.6 to 1.9) makes a module's input dist at its first batch, for that form; batches of
    the other one fail in it with a message about something else.

    Args:
        name: of the module, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._variable: bool | None = None

    def check(self, features: KeyedJaggedTensor) -> None:
        """Refuse a batch of another form than the first.

        Raises:
            ExactnessError: names the module and both forms.
        """
        variable = features.variable_stride_per_key()
        if self._variable is None:
            self._variable = variable
        if self._variable != variable:
            raise ExactnessError(
                f"{self._name}: its first batch was {_FORMS[self._variable]}, this one is "
                f"{_FORMS[variable]}, and TorchRec makes the input dist for the form of the first. "
                "Convert all batches alike, those of an evaluation too: of B rows, a plain batch "
                "is deduplicated in form with stride_per_key_per_rank=[[B]] * len(keys) and "
                "inverse_indices=(keys, torch.arange(B).expand(len(keys), B))"
            )


def refuse_inverse_indices(
    features: KeyedJaggedTensor, *, allow_variable_batch: bool = False
) -> None:
    """Refuse an EmbeddingCollection's input whose inverse indices would be lost.

    On CPU a sharded EmbeddingCollection expands a variable batch by
    ``fbgemm.permute_1D_sparse_data``, which has no gradient there (torchrec 1.6 to 1.9): forward
    is right, and the tables never learn. An unsharded one ignores the inverse indices.

    Raises:
        ExactnessError: says what to feed instead.
    """
    variable = features.variable_stride_per_key()
    if variable and allow_variable_batch:
        return
    if variable or features.inverse_indices_or_none() is not None:
        raise ExactnessError(
            "an EmbeddingCollection got deduplicated input as a KeyedJaggedTensor with "
            "stride_per_key_per_rank or inverse_indices, which loses its gradient or its inverse: "
            "feed it a plain KeyedJaggedTensor over unique rows (batch.sequence_features), pool "
            "those, and repeat the results with index_select(0, batch.inverse_lookup[feature])"
        )


def watch_batches(sharded: ShardedModule[Any, Any, Any, Any], name: str, refusal: str) -> None:
    """Have a sharded module of TorchRec's check its batches.

    Args:
        sharded: takes a KeyedJaggedTensor.
        name: for messages.
        refusal: of deduplicated batches: why, and what to do; empty where it takes them.
    """
    form, input_dist = BatchForm(name), sharded.input_dist

    def checked(ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            if refusal and features.variable_stride_per_key():
                raise ExactnessError(f"{name}: {refusal}")
            form.check(features)
        return input_dist(ctx, features, *args, **kwargs)

    # Found before the class's by its forward and by train pipelines.
    sharded.input_dist = checked
