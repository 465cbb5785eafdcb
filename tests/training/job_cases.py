"""What jobs come to on ranks."""

from __future__ import annotations

from recd_plugins.training.trainer import Job, train


def losses_of_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[list[float] | str]:
    def losses(job: Job) -> list[float] | str:
        try:
            return train(rank, world_size, job).losses
        except Exception as error:  # of FBGEMM, too
            return str(error)

    return [losses(job) for job in jobs]
