"""FBGEMM optimizers, which update embedding rows in the backward pass, as plugins."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from recd_plugins.api import Optimizer, PluginOptions, RowUpdate, Table

_LEAST, _MOST = 1.2e-38, 1e9  # Smaller values are 0 in float32, the dtype of the kernels.


class FusedOptimizer(Optimizer):
    """Base of optimizers that FBGEMM applies to embedding rows in the backward pass."""

    class Options(PluginOptions):
        learning_rate: float = Field(
            ge=0, le=_MOST, description="Learning rate. With 0, the tables are not trained."
        )

        @field_validator("learning_rate")
        @classmethod
        def _is_normal_float32(cls, rate: float) -> float:
            if 0 < rate < _LEAST:
                raise ValueError(
                    f"learning_rate {rate} is too small for float32, the dtype of FBGEMM's "
                    "kernels. Use 0 or a larger value."
                )
            return rate

    #: The matching class in ``torchrec.optim``.
    optimizer: ClassVar[str]

    def update(self, table: Table) -> RowUpdate:  # noqa: ARG002
        """Return the TorchRec optimizer class and its arguments, equal for all tables."""
        from torchrec import optim

        arguments = self.arguments(self.options.model_dump())
        arguments["lr"] = arguments.pop("learning_rate")
        return RowUpdate(getattr(optim, self.optimizer), arguments)

    def arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the FBGEMM optimizer kwargs for the given option values."""
        return options


class Sgd(FusedOptimizer):
    """Stochastic gradient descent (SGD)."""

    name = "torchrec.sgd"
    optimizer = "SGD"


class Adagrad(FusedOptimizer):
    """Adagrad with one accumulator of squared gradients per weight."""

    name = "torchrec.adagrad"
    optimizer = "Adagrad"

    class Options(FusedOptimizer.Options):
        eps: float = Field(
            default=1e-8, ge=_LEAST, le=_MOST, description="Epsilon, added to the denominator."
        )


class RowWiseAdagrad(FusedOptimizer):
    """Row-wise Adagrad, with one accumulator of squared gradients per row."""

    name = "torchrec.rowwise_adagrad"
    optimizer = "RowWiseAdagrad"

    class Options(Adagrad.Options):
        weight_decay: float = Field(
            default=0.0,
            ge=0,
            le=_MOST,
            description="Weight decay. Only rows in the batch decay. Needs CUDA.",
        )
        weight_decay_mode: Literal["l2", "decouple"] = Field(
            default="l2",
            description="Add weight decay to the gradient (l2) or to the update (decouple).",
        )

        @model_validator(mode="after")
        def _decays(self) -> Self:
            if self.weight_decay_mode == "decouple" and not self.weight_decay:
                raise ValueError(
                    "weight_decay_mode: decouple has no effect, because option 'weight_decay' is "
                    "0. Set 'weight_decay', or remove 'weight_decay_mode'."
                )
            return self

    def arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the FBGEMM optimizer kwargs, with the weight decay mode as an enum."""
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

        mode = options.pop("weight_decay_mode").upper() if options["weight_decay"] else "NONE"
        return {**options, "weight_decay_mode": WeightDecayMode[mode]}


class Adam(FusedOptimizer):
    """Adam. Only rows in the batch are updated. Needs CUDA."""

    name = "torchrec.adam"
    optimizer = "Adam"

    class Options(Adagrad.Options):
        beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment.")
        weight_decay: float = Field(
            default=0.0,
            ge=0,
            le=_MOST,
            description="Decoupled weight decay. Only rows in the batch decay.",
        )


class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row instead of one per weight. Needs CUDA."""

    name = "torchrec.partial_rowwise_adam"
    optimizer = "PartialRowWiseAdam"


class Lamb(Adam):
    """LAMB: Adam, with each row's update scaled by the norm of the row. Needs CUDA."""

    name = "torchrec.lamb"
    optimizer = "LAMB"


class PartialRowWiseLamb(Adam):
    """LAMB with one second moment per row instead of one per weight. Needs CUDA."""

    name = "torchrec.partial_rowwise_lamb"
    optimizer = "PartialRowWiseLAMB"
