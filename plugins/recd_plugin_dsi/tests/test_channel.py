"""Blocks between two ends in one process."""

import threading
from multiprocessing import Pipe

from recd_plugin_dsi.helper import Sender, receive_block


def test_blocks_wait_until_those_before_are_taken():
    """A connection alone would take a hundred of them, of any size."""
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
