"""How far a run came, and the file of a checkpoint that says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint_files.curve import ValidationCurve
from recd_plugins.training.checkpoint_files.errors import DamagedError

PROGRESS = "progress.json"
# What other programs read as a whole number, too.
_MOST = 2**53
Number = Annotated[int, Field(ge=0, le=_MOST)]


@dataclass(frozen=True)
class Progress:
    """How far a run came.

    Attributes:
        step: optimizer steps done.
        epoch: epochs of the reader completed.
        reader: the reader's position after the last batch that was trained on.
        losses: the mean loss over ranks of every step so far; none where nobody kept them.
        callbacks: states of callbacks by name, each of every rank.
        validation: of the run so far; None where it has none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    step: Number = 0
    epoch: Number = 0
    reader: dict[str, Any] | None = None
    losses: list[FiniteFloat] = field(default_factory=list)
    callbacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    validation: ValidationCurve | None = None

    @property
    def best_step(self) -> int | None:
        """The step after which the model was best; None where nobody validated it."""
        return None if self.validation is None else self.validation.best_step

    def with_states(
        self,
        losses: list[float],
        callbacks: dict[str, list[dict[str, Any]]],
        validation: ValidationCurve | None = None,
    ) -> Progress:
        """The same point with the curves up to it and the states of callbacks."""
        return replace(self, losses=list(losses), callbacks=callbacks, validation=validation)


_PROGRESS = TypeAdapter(Progress)


def progress_text(progress: Progress) -> str:
    """JSON of a progress that can be read again.

    Raises:
        RecdError: a value cannot be; a loss that is not finite, for one.
    """
    values = asdict(progress)
    for later in ("callbacks", "validation"):  # as versions without them write and read it
        if not values[later]:
            del values[later]
    text = json.dumps(values) + "\n"
    _check(text, "this step cannot be saved", RecdError)
    return text


def read_progress(checkpoint: Path) -> Progress:
    """What ``progress.json`` of a checkpoint says.

    Raises:
        DamagedError: it is missing, or a field is none that can be; names it.
    """
    path = checkpoint / PROGRESS
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror or error})") from error
    progress = _check(text, str(path), DamagedError)
    if checkpoint.name != step_name(progress.step):
        raise DamagedError(
            f"{path}: step: is {progress.step}, of a checkpoint {checkpoint.name}; where it was "
            f"renamed or copied, name the folder {step_name(progress.step)}"
        )
    return progress


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:09d}"


def _check(text: str | bytes, where: str, error_type: type[RecdError]) -> Progress:
    try:
        progress = _PROGRESS.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        shown = f"{name}: is {first['input']!r:.40} ({first['msg']})" if name else first["msg"]
        raise error_type(f"{where}: {shown}") from error
    if progress.losses and len(progress.losses) != progress.step:
        raise error_type(f"{where}: losses: are {len(progress.losses)}, of {progress.step} steps")
    return progress
