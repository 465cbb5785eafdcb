"""The sort benchmark takes no time of a program that did not sort."""

from pathlib import Path

import pytest

from recd_plugin_recd.benchmarks import cluster
from recd_plugin_recd.papercal_table import TableOptions, write_table

# Work, below the imports.
COPY = "\n\nimport shutil; shutil.copytree(source, target)"
SOME = "\n\nimport shutil; shutil.copyfile(source + '/part-00000.parquet', target)"
SORT = (
    "\n\nimport pyarrow.parquet as pq\nkeys = [('session_id', 'ascending'), ('ts', 'ascending')]\n"
    "pq.write_table(pq.read_table(source).sort_by(keys), target)"
)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (COPY, "rows are not by session and time"),
        (SOME, "of 256 rows were written"),
        (SORT, None),
    ],
)
def test_what_was_written_is_looked_at(tmp_path: Path, work: str, message: str | None) -> None:
    source = tmp_path / "source"
    write_table(source, TableOptions(rows=256, layout="interleaved", files=2, row_group_rows=128))
    if message is None:
        assert cluster._measure(work, source, tmp_path / "target", "").seconds > 0
    else:
        with pytest.raises(RuntimeError, match=message):
            cluster._measure(work, source, tmp_path / "target", "")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
