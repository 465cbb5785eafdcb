"""Schema of ``registry.yaml``; ``recd schema`` shows the descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from recd_plugins.config.built_in_kinds import BY_NAME
from recd_plugins.interfaces import Kind

# Strict: true is no number, and 2.5 is not 2. At most what the words of tensors hold.
Count = Annotated[StrictInt, Field(gt=0, lt=1 << 63)]
# Of processes, and of columns and layers: what is larger is a slip of the pen.
Width = Annotated[StrictInt, Field(gt=0, le=1 << 20)]


def _is_not_0_to_kernels(value: float) -> float:
    if value < 1.2e-38:
        raise ValueError("is 0 as a float32, which kernels compute with")
    return value


# More than that makes infinities in few steps.
Float32 = Annotated[
    float, Field(gt=0, le=1e9, allow_inf_nan=False), AfterValidator(_is_not_0_to_kernels)
]


class Spec(BaseModel):
    """A part of a registry file: every key is known, and nothing changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSpec(Spec):
    """When and where training writes checkpoints."""

    path: str | None = Field(default=None, description="Folder of checkpoints; null writes none.")
    every: Count = Field(default=100, description="Steps between checkpoints.")
    keep: Count = Field(
        default=2,
        description="Checkpoints kept, besides the best one of `training.validation`; older ones "
        "are removed.",
    )

    @field_validator("path")
    @classmethod
    def _is_a_path(cls, path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError("is a URL; checkpoints go into a folder that all ranks share")
        return path

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        given = self.model_fields_set
        if given and "path" not in given:  # path: null says that there is to be none
            raise ValueError(f"{' and '.join(sorted(given))} without path write no checkpoint")
        return self


class ScheduleSpec(Spec):
    """How all learning rates rise and fall with the steps."""

    warmup: StrictInt = Field(
        default=0, ge=0, description="First steps, in which the rates rise to what they are."
    )
    decay: Literal["none", "linear", "cosine"] = Field(
        default="none", description="How they fall after that."
    )
    steps: Count | None = Field(default=None, description="The step from which on they stay low.")
    floor: float = Field(
        default=0.0, ge=0, le=1, description="What is left of them then: 0.1 is a tenth."
    )

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.decay != "none" and self.steps is None:
            raise ValueError(f"decay: {self.decay} needs steps, the step at which it has ended")
        if self.decay == "none" and (self.steps is not None or self.floor):
            raise ValueError("steps and floor are about decay; name one, as decay: cosine")
        if self.steps is not None and self.steps <= self.warmup:
            raise ValueError(f"steps: {self.steps} is not behind the warm-up of {self.warmup}")
        return self


class ValidationSpec(Spec):
    """How the test split is measured while training goes on, and what follows from it."""

    every: Count = Field(description="Steps between validations.")
    metric: str = Field(
        default="normalized_entropy",
        description="The figure that they go by: normalized_entropy, log_loss, auc, or one of a "
        "metric of this file.",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None,
        description="Whether the least or the most of it is best; null where that is known.",
    )
    patience: Count | None = Field(
        default=None,
        description="Validations in a row without a better one after which training stops; null "
        "never stops.",
    )

    @field_validator("metric")
    @classmethod
    def _has_a_best(cls, metric: str) -> str:
        if metric in ("calibration", "num_samples"):
            raise ValueError(f"the least and the most {metric} are no best; name another")
        return metric

    @model_validator(mode="after")
    def _knows_the_best(self) -> Self:
        if self.mode is None and self.metric not in _BEST:
            known = ", ".join(f"{name} ({mode})" for name, mode in _BEST.items())
            raise ValueError(
                f"metric {self.metric} needs mode: min or max, which is known of {known}"
            )
        if self.mode not in (None, _BEST.get(self.metric, self.mode)):
            raise ValueError(f"mode: {self.mode} of {self.metric} is its worst; leave out mode")
        return self

    @property
    def best(self) -> Literal["min", "max"]:
        """The mode, said or known."""
        return self.mode or _BEST[self.metric]


_BEST: dict[str, Literal["min", "max"]] = {
    "normalized_entropy": "min",
    "log_loss": "min",
    "auc": "max",
}


class TrainingSpec(Spec):
    """How training runs."""

    # FBGEMM counts the rows of a batch in 32 bits.
    batch_size: Count = Field(default=512, lt=1 << 31, description="Rows in a batch of one rank.")
    optimizer: Literal["sgd", "rowwise_adagrad"] = Field(
        default="rowwise_adagrad", description="Optimizer of the embedding tables."
    )
    learning_rate: Float32 = Field(default=0.02, description="Learning rate of the tables.")
    eps: Float32 = Field(default=1e-8, description="Epsilon of row-wise Adagrad.")
    dense_learning_rate: Float32 | None = Field(
        default=None,
        description="Learning rate of the dense parameters; null takes learning_rate.",
    )
    schedule: ScheduleSpec | None = Field(
        default=None, description="Warm-up and decay of all learning rates; null keeps them."
    )
    wire: Literal["fp32", "fp16", "bf16", "int8"] = Field(
        default="fp32",
        description="Format of embeddings and of their gradients between ranks. fp16 and bf16 take "
        "half of the bytes, int8 three eighths or less, and round what is sent: losses are no "
        "longer those of fp32.",
    )
    overlap: bool | None = Field(
        default=None,
        description="Look up rows of the next batch while gradients of dense layers are summed: "
        "the same losses in less time where ranks wait for a network. With null, on CPUs of "
        "several nodes, but where all tables are on every rank.",
    )
    ranks: Width = Field(default=1, description="Processes to train on.")
    ranks_per_node: Count | None = Field(
        default=None,
        description="Ranks that make a node, where `recd run` starts them itself: one machine can "
        "pretend to be several nodes; null makes all ranks one node. Under torchrun its nodes "
        "count.",
    )
    topology: str | None = Field(
        default=None,
        description="The cluster that tables are planned for: a file that `recd calibrate` wrote, "
        "or a name that `recd plan --topology` takes. With null, `recd run` on several nodes "
        "measures them at its start, for 10 to 20 seconds or longer where other programs run, and "
        "all else is planned for `machine`, of which nothing is measured.",
    )
    workers: StrictInt = Field(
        default=0,
        ge=0,
        le=1 << 10,
        description="Processes of each rank that read and convert its batches; with 0 it does so "
        "itself.",
    )
    epochs: Count = Field(default=1, description="Passes over the training split.")
    steps: Count | None = Field(
        default=None, description="Stop after so many steps; null trains all epochs."
    )
    seed: StrictInt = Field(
        default=0,
        ge=0,
        lt=1 << 63,
        description="Seed of the initial weights, and of what torch, numpy and Python draw while "
        "the model is trained.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where to train; auto takes CUDA where there is a device for each rank and the "
        "CUDA build of FBGEMM, and else the CPU.",
    )
    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), description="Checkpoints; null writes none."
    )
    hang_notice: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without progress after which the run says who waits for whom.",
    )
    hang_timeout: float | None = Field(
        default=1500.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without progress after which it ends, to be resumed; null leaves that "
        "to the collectives, which fail after 30 minutes.",
    )
    evaluate: bool = Field(
        default=True, description="Measure the test split at the end, where there is one."
    )
    validation: ValidationSpec | None = Field(
        default=None, description="Measure it while training goes on, too; null does not."
    )

    @field_validator("checkpoint", mode="before", json_schema_input_type=CheckpointSpec | None)
    @classmethod
    def _null_is_none(cls, checkpoint: Any) -> Any:
        return {} if checkpoint is None else checkpoint

    @field_validator("ranks_per_node")
    @classmethod
    def _fill_nodes(cls, ranks_per_node: int | None, info: ValidationInfo) -> int | None:
        ranks = info.data.get("ranks")
        if ranks and ranks_per_node and ranks % ranks_per_node:
            raise ValueError(
                f"{ranks} ranks do not fill nodes of {ranks_per_node} each; every node needs as "
                "many"
            )
        return ranks_per_node

    @field_validator("validation")
    @classmethod
    def _has_a_test(
        cls, validation: ValidationSpec | None, info: ValidationInfo
    ) -> ValidationSpec | None:
        if validation is not None and info.data.get("evaluate") is False:
            raise ValueError(
                "validation measures the test split, and training.evaluate is false; leave one out"
            )
        return validation

    def overlaps(self, device_type: str, nodes: int) -> bool:
        """Return whether ranks of ``nodes`` nodes look up ahead."""
        return device_type == "cpu" and nodes > 1 if self.overlap is None else self.overlap

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // (self.ranks_per_node or self.ranks)


class PluginSpec(Spec):
    """One plugin and its options."""

    use: str = Field(description="Name of the plugin: package.part.")
    options: dict[str, Any] = Field(default={}, description="Options of the plugin.")


class WrapperSpec(PluginSpec):
    """A wrapper of the dataset and its options."""

    enabled: bool = Field(default=True, description="False leaves the wrapper out.")


class DatasetSpec(PluginSpec):
    """A dataset, its options, and what is wrapped around it."""

    wrap: list[WrapperSpec] = Field(
        default=[],
        description="Wrappers, which put its rows into another order; each stands around those "
        "before it.",
    )


class EntrySpec(PluginSpec):
    """A plugin of a list."""

    enabled: bool = Field(default=True, description="False leaves the entry out.")


class FeatureEntrySpec(PluginSpec):
    """A plugin for some features."""

    features: list[str] = Field(
        min_length=1, description="Names of features; * ? and [] match as in file names."
    )
    enabled: bool = Field(default=True, description="False leaves the entry out.")


class TableEntrySpec(PluginSpec):
    """A plugin for some tables."""

    tables: list[str] = Field(
        min_length=1,
        description="Names of tables (t_<feature>); * ? and [] match as in file names.",
    )
    enabled: bool = Field(default=True, description="False leaves the entry out.")


class TableSpec(Spec):
    """Sizes of the tables that one pattern matches."""

    num_embeddings: Count = Field(description="Rows of the table.")


class ModelSpec(Spec):
    """The built-in model's kind and sizes. Each feature has a table of its own, t_<feature>."""

    architecture: Literal["dlrm", "dcn"] = Field(
        default="dlrm",
        description="How the features' vectors meet: dlrm takes dot products of all pairs, dcn a "
        "cross network.",
    )
    # FBGEMM's kernels read four scalars at a time.
    embedding_dim: Width = Field(default=16, multiple_of=4, description="Scalars in an embedding.")
    num_embeddings: Count = Field(
        default=100_000, description="Rows of a table that `tables` does not name."
    )
    tables: dict[str, TableSpec] = Field(
        default={}, description="Sizes by name or pattern of a table; the first match counts."
    )
    bottom_mlp: list[Width] = Field(
        default=[64], description="Hidden layers over dense features; embedding_dim is appended."
    )
    top_mlp: list[Width] = Field(
        default=[128, 64], description="Hidden layers over the interaction; 1 is appended."
    )
    cross_net: Literal["low_rank", "full", "vector"] = Field(
        default="low_rank",
        description="Of dcn, the weights of a cross layer: two thin matrices, one square matrix "
        "(both DCN-v2) or one vector (DCN).",
    )
    cross_layers: Width = Field(default=3, description="Of dcn, the cross layers.")
    low_rank_dim: Width | None = Field(
        default=None,
        description="Of cross_net low_rank, the thin side of its matrices; null takes a quarter of "
        "the cross network's inputs.",
    )
    bag_pooling: Literal["sum", "mean"] = Field(
        default="sum", description="Pooling of features that no pooling entry names."
    )
    pool_rows: Literal["unique", "all"] = Field(
        default="unique",
        description="Rows that pooling entries see; with all, duplicates are made again before "
        "pooling: the same results, and what deduplicated compute saves can be measured.",
    )

    @field_validator("cross_net", "cross_layers", "low_rank_dim")
    @classmethod
    def _suit_the_architecture(cls, value: Any, info: ValidationInfo) -> Any:
        architecture = info.data.get("architecture", "dcn")
        if architecture != "dcn":
            raise ValueError(
                f"is an option of architecture dcn, and this model's is {architecture}; leave it "
                "out, or set model.architecture: dcn"
            )
        cross_net = info.data.get("cross_net", "low_rank")
        if info.field_name == "low_rank_dim" and value is not None and cross_net != "low_rank":
            raise ValueError(
                f"is an option of cross_net low_rank, and this model's is {cross_net}; leave it out"
            )
        return value


class _Versioned(Spec):
    version: Literal[1] = Field(description="Version of this file format.")


class RegistrySpec(_Versioned):
    """Sections of a registry file without plugins."""

    model: ModelSpec | None = Field(default=None, description=BY_NAME["model"].description)
    training: TrainingSpec = Field(default=TrainingSpec(), description="How training runs.")


def registry_spec(
    kinds: Iterable[Kind], data: Mapping[str, Any] | None = None, *, needs_data: bool = True
) -> type[RegistrySpec]:
    """Return the schema of registry files with sections of these kinds.

    Args:
        kinds: plugin kinds.
        data: file content, which decides between a model plugin and the built-in model.
        needs_data: whether dataset and converter are required.
    """
    written = {} if data is None else data.get("model")
    plugin = isinstance(written, dict) and not written.keys().isdisjoint(PluginSpec.model_fields)
    model = PluginSpec if plugin else ModelSpec
    either = PluginSpec | ModelSpec if data is None else model
    return _registry_spec(tuple(kinds), either, needs_data)


# Making it takes longer than checking a file with it.
@lru_cache(maxsize=8)
def _registry_spec(kinds: tuple[Kind, ...], model: Any, needs_data: bool) -> type[RegistrySpec]:
    fields: dict[str, Any] = {}
    for kind in kinds:
        entry = _entry_spec(kind)
        if kind.name == "model":
            continue  # it stands in every RegistrySpec
        if kind.claims == "one" and needs_data:
            fields[kind.section] = entry, Field(description=kind.description)
        elif kind.claims in ("one", "optional one"):
            fields[kind.section] = entry | None, Field(None, description=kind.description)
        else:
            fields[kind.section] = list[entry], Field([], description=kind.description)  # type: ignore[valid-type]
    sections: Any = create_model("Sections", __base__=_Versioned, **fields)
    of_model: Any = model | None, RegistrySpec.model_fields["model"]
    # Fields stand in the order of the bases, the last one's first: version, sections, model.
    return create_model(
        "RegistrySpec",
        __base__=(RegistrySpec, sections),
        __doc__="A registry file. Sections stand in the order in which data meets them.",
        model=of_model,
    )


def _entry_spec(kind: Kind) -> type[PluginSpec]:
    if kind.name == "dataset":
        return DatasetSpec
    if kind.claimed is not None:
        return FeatureEntrySpec if kind.claimed == "feature" else TableEntrySpec
    return EntrySpec if kind.claims == "list" else PluginSpec
