"""The example of docs/access.md runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "access.md").read_text()


def test_the_example_runs():
    block = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert block
    names: dict[str, object] = {}
    exec(block[1], names)
    assert "profile" in names
