"""How long the process that made a batch was busy with which part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: What a batch is made of, in order.
STALL_CAUSES = ("fill", "convert", "preprocess", "transfer")


@dataclass(frozen=True, slots=True)
class MakingTimes:
    """Seconds that one batch took, by part.

    All are wall time of the process that did the part, which does one batch at a time: a reader
    makes a batch every ``total`` seconds.

    Attributes:
        fill: until its rows were there: reading, decompressing, decoding and joining them. Where
            the dataset reads ahead in a thread, only what was left to wait for.
        convert: the converter, and the check of what it made.
        preprocess: the preprocessing steps, and the check of the ids.
        transfer: from the preprocessed batch to the trainer's input: lowering, packing, and what
            ``arrival`` says. The way over a network counts where a process waits for it.
        arrival: of ``transfer``, what the trainer's process did itself when it took the batch:
            unpacking and pinning. Of the batches of one block the first has it all.
    """

    fill: float = 0.0
    convert: float = 0.0
    preprocess: float = 0.0
    transfer: float = 0.0
    arrival: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all processes together."""
        return self.fill + self.convert + self.preprocess + self.transfer

    @property
    def reader(self) -> float:
        """Seconds of the process that made it, where that is not the trainer's."""
        return self.total - self.arrival

    def transferred(self, seconds: float) -> MakingTimes:
        """With more transfer, in the process that made it."""
        return replace(self, transfer=self.transfer + seconds)

    def arrived(self, seconds: float) -> MakingTimes:
        """With more transfer, in the trainer's process while it took the batch."""
        return replace(self, transfer=self.transfer + seconds, arrival=self.arrival + seconds)

    def causes_of(self, waited: float) -> tuple[float, ...]:
        """Seconds of a wait for this batch by cause, in the order of ``STALL_CAUSES``; they add up.

        What the trainer's process did itself in that time is known: ``arrival``, which is transfer.
        The rest is waiting for the batch to be made, and each part has the share of it that it has
        of the making. All is transfer where no making times came along.
        """
        arrival = min(self.arrival, waited)
        rest = waited - arrival
        made = self.fill, self.convert, self.preprocess, self.transfer - self.arrival
        total = sum(made)
        if total <= 0:
            return 0.0, 0.0, 0.0, waited
        *first, last = (rest * part / total for part in made)
        return (*first, last + arrival)
