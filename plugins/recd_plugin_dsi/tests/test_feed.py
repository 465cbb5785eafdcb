"""Options, autoscaling and the channel of blocks, without Ray."""

import importlib.util
import math
import threading
from multiprocessing import Pipe

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from recd_plugin_dsi.feed import Window, wanted
from recd_plugin_dsi.helper import Sender, receive_block
from recd_plugin_dsi.options import RayOptions, check_ray
from recd_plugins.runtime.errors import SetupError

TARGET = 0.05


def settle(train: float, make: float, bounds: tuple[int, int]) -> list[int]:
    """Numbers of readers over time, of a trainer and readers that take so many seconds a batch."""
    readers = [bounds[0]]
    for _ in range(40):
        step = max(train, make / readers[-1])
        window = Window(32, 32 * step, 32 * (step - train), 32 * make)
        readers.append(wanted(window, readers[-1], bounds, TARGET))
    return readers


@given(st.floats(0.01, 1), st.floats(0.001, 10), st.integers(1, 4), st.integers(0, 40))
def test_settles_where_the_trainer_need_not_wait(train, make, low, more):
    bounds = low, low + more
    readers = settle(train, make, bounds)
    assert all(bounds[0] <= number <= bounds[1] for number in readers)
    assert readers[-1] == readers[-2], "it does not swing"
    share = 1 - train / max(train, make / readers[-1])
    assert share <= TARGET or readers[-1] == bounds[1]
    assert settle(train, make, (1, 2000))[-1] <= math.ceil(make / train) + 1, "no more than needed"


@pytest.mark.parametrize(("train", "make", "settled"), [(1.0, 3.2, 4), (1.0, 0.3, 1), (1, 8, 8)])
def test_numbers(train, make, settled):
    assert settle(train, make, (1, 16))[-1] == settled


def test_readers_that_wait_are_taken_away_one_by_one():
    window = Window(32, 32.0, 0.0, 32 * 1.5)
    assert wanted(window, 6, (1, 8), TARGET) == 5
    assert wanted(window, 2, (1, 8), TARGET) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_readers": 3, "max_readers": 2}, r"'min_readers' \(3\) is larger than 'max_readers"),
        ({"readers": 2, "max_readers": 4}, "'readers' cannot be combined with 'min_readers'"),
        ({"cpus": 4, "address": "auto"}, "'cpus' and 'address' are both set"),
        ({"memory": "lots"}, "'lots' is not a positive number of bytes"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValidationError, match=message):
        RayOptions.model_validate(options)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (2, 2)),
        ({"readers": 5}, (5, 5)),
        ({"max_readers": 4}, (1, 4)),
        ({"min_readers": 2, "max_readers": 4}, (2, 4)),
    ],
)
def test_bounds(options, bounds):
    assert RayOptions.model_validate(options).bounds == bounds


def test_ray_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r'pip install "recd-plugins\[ray\]"'):
        check_ray()


def test_blocks_wait_until_those_before_are_taken():
    theirs, ours = Pipe()
    sender, sent = Sender(ours), []

    def send():
        for number in range(5):
            sender.send_block(memoryview(bytes([number]) * 1000), number=number)
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(5):
        kind, fields = theirs.recv()
        assert (kind, fields) == ("block", {"number": number, "size": 1000})
        block = receive_block(theirs, fields["size"])
        assert bytes(block) == bytes([number]) * 1000
        thread.join(0.05)
        assert len(sent) <= number + 2, "two are on the way"
        sender.taken()
    thread.join(30)
    assert sent == list(range(5))
