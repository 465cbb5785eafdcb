from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

COMMANDS = [
    "analyze t.parquet --html r.html",
    "cluster t.parquet new",
    "convert-layout new dict --layout list_dict",
    "logs write t.parquet log",
    "logs read log back.parquet",
]


def test_commands_that_read_and_write_tables_do_not_import_torch(tmp_path):
    columns = {"session_id": [1] * 50, "ts": range(50), "x": [[1]] * 50}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    program = (
        "import sys\nfrom recd_plugins.cli import main\n"
        f"for command in {COMMANDS!r}:\n"
        "    main(command.split(), standalone_mode=False)\n"
        "assert not {'torch', 'torchrec', 'fbgemm_gpu'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
