"""Bytes in words."""

import pytest

from recd_plugins.runtime.text import read_bytes


@pytest.mark.parametrize(
    ("words", "num_bytes"),
    [("256MB", 256_000_000), ("2GiB", 2**31), ("1.5 kib", 1536), (4096, 4096), ("10b", 10)],
)
def test_numbers_with_units(words, num_bytes):
    assert read_bytes(words) == num_bytes


@pytest.mark.parametrize(
    "words", ["", "MB", "12 parsecs", "-3MB", "0", "0.1b", "1.5x", "1e9", "9" * 400]
)
def test_what_is_no_number_of_bytes(words):
    with pytest.raises(ValueError, match="256MB"):
        read_bytes(words)
