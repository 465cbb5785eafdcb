"""``dsi.ray`` makes the batches of a rank that reads by itself, whatever becomes of its readers."""

from contextlib import suppress
from itertools import islice

import psutil
import pytest
from tests.small_registry import random_rows, write_registry

from recd_plugin_dsi.tests.numbered import BATCH, ROWS, registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.runtime.errors import RegistryError, SetupError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train


def options(ray_address, **more):
    return {"address": ray_address, "cpus_per_reader": 0.25, "start_timeout": 250, **more}


def numbers(batches):
    return [int(number) for batch in batches for number in batch.dense_features.flatten()]


def readers_of_ray():
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if "make_blocks" in " ".join(each.info["cmdline"] or ())]


def test_killed_readers_lose_and_repeat_no_row(ray_address, capfd):
    ray = options(ray_address, readers=2, memory="1MB", deaths=6)
    seen: list[int] = []
    # The rank waits for readers, however slow the machine is: those that are killed are at work.
    with build_dataloader(registry(ray, seconds=0.15), 0, 1) as loader:
        for step, batch in enumerate(loader):
            seen += numbers([batch])
            if step in (2, 50) and (readers := readers_of_ray()):
                # Those that are still importing have begun no block.
                with suppress(psutil.NoSuchProcess):
                    max(readers, key=lambda reader: reader.cpu_times().user).kill()
        assert loader.report()["readers that died"] >= 1
    assert sorted(seen) == list(range(ROWS))
    assert seen == numbers(build_dataloader(registry(None), 0, 1)), "the order, too"
    assert "a reader process died" in capfd.readouterr().err


def test_a_block_that_kills_its_readers_is_an_error(ray_address):
    deadly = registry(options(ray_address, readers=1, deaths=1), deadly=500)
    with build_dataloader(deadly, 0, 1) as loader, pytest.raises(SetupError) as caught:
        list(loader)
    assert "readers of rank 0 died 2 times" in str(caught.value)
    assert "Reduce option 'readers'" in str(caught.value)


def test_goes_on_elsewhere(ray_address):
    """Embedded, on Ray by two ranks, embedded by three: every row once, but the remainder."""
    plain, on_ray = registry(None), registry(options(ray_address, readers=1))
    loader = build_dataloader(plain, 0, 2)
    seen = numbers(islice(loader, 7))
    state = loader.state_dict()
    other = build_dataloader(plain, 1, 2)
    seen += numbers(islice(other, 7))
    with build_dataloader(on_ray, 0, 2) as first, build_dataloader(on_ray, 1, 2) as second:
        for each in (first, second):
            each.load_state_dict(state)
            seen += numbers(islice(each, 11))
        assert first.state_dict() == second.state_dict()
        state = first.state_dict()
    for rank in range(3):
        loader = build_dataloader(plain, rank, 3)
        loader.load_state_dict(state)
        seen += numbers(loader)
    assert len(seen) == len(set(seen)) > ROWS - 3 * BATCH


def test_a_reader_without_blocks_of_its_own(ray_address, tmp_path):
    ray = options(ray_address, readers=2)
    unskippable = registry(ray, in_blocks=False, deadly=500, only_once=tmp_path / "died")
    with build_dataloader(unskippable, 0, 1) as loader:
        assert numbers(loader) == numbers(build_dataloader(registry(None), 0, 1))
    assert (tmp_path / "died").exists()


def test_more_readers_while_the_trainer_waits(ray_address, capfd):
    ray = options(ray_address, cpus_per_reader=1.5, max_readers=8, stall_window=8, memory="1MB")
    with build_dataloader(registry(ray, seconds=0.1), 0, 1) as loader:
        assert sorted(numbers(loader)) == list(range(ROWS))
        assert loader.report()["most readers"] == 2
    said = capfd.readouterr().err
    assert "number of readers changes from" in said
    assert "the Ray cluster has CPUs for 2 of" in said


def test_more_readers_than_the_cluster_has_cores(ray_address):
    ray = options(ray_address, readers=9, cpus_per_reader=1)
    with pytest.raises(RegistryError, match="9 readers for each of 1 ranks need 9 CPUs, but"):
        build_dataloader(registry(ray), 0, 1)


def test_an_iteration_that_was_left_and_is_not_closed(ray_address):
    expected = numbers(build_dataloader(registry(None), 0, 1))
    with build_dataloader(registry(options(ray_address, readers=1)), 0, 1) as loader:
        start = loader.state_dict()
        left = iter(loader)
        next(left)
        loader.load_state_dict(start)
        again = iter(loader)
        assert numbers(islice(again, 30)) == expected[: 30 * BATCH]
        left.close()
        assert numbers(islice(again, 30)) == expected[30 * BATCH : 60 * BATCH]
    again.close()
    assert numbers(again) == []


def trained(rank, world_size, jobs):
    return [train(rank, world_size, job).losses for job in jobs]


def test_training_is_that_of_ranks_that_read_by_themselves(ray_address, tmp_path):
    ray = {"use": "dsi.ray", "options": options(ray_address, readers=1)}
    own, on_ray = (
        write_registry(
            tmp_path,
            name,
            dataset=random_rows(256),
            converter={"use": "recd.ikjt", "options": {"groups": [["item"]]}},
            ingestion=ingestion,
            training={"ranks": 2, "evaluate": False, "learning_rate": 0.1, "device": "auto"},
        )
        for name, ingestion in (("own.yaml", None), ("ray.yaml", ray))
    )
    jobs = [Job(own, "baseline"), Job(own), Job(on_ray)]
    stock, alone, fed = run_on_ranks(trained, 2, jobs)[0]
    assert len(stock) == 8
    assert max(stock) - min(stock) > 1e-4, "nothing was learned"
    assert fed == alone == pytest.approx(stock, abs=1e-6)
