import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffurefill.config import UserError
from diffurefill.data import parquet


def test_row_groups_come_out_in_order_with_nulls(tmp_path: Path) -> None:
    texts = [None if n % 7 == 0 else f"text {n}" for n in range(1000)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(1000), "text": texts}), path, row_group_size=600)
    num_row_groups = parquet.count_row_groups(path, "text")
    assert num_row_groups == 2
    read = [list(parquet.read_row_group(path, g, "text")) for g in range(num_row_groups)]
    assert read == [texts[:600], texts[600:]]


def test_a_large_string_column_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": pa.array(["x"], pa.large_string())}), path)
    assert parquet.count_row_groups(path, "body") == 1


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"title": ["x"], "body": ["y"]}), path)
    with pytest.raises(UserError, match=r"no column 'text'.*title, body"):
        parquet.count_row_groups(path, "text")


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(UserError, match="holds int64, not text"):
        parquet.count_row_groups(path, "text")


def test_a_file_that_is_no_parquet_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match="cannot read") as caught:
        parquet.count_row_groups(path, "text")
    assert "\n" not in str(caught.value)


def test_damaged_pages_are_reported_with_their_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{n} " * 50 for n in range(2000)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[100:1100] = bytes(1000)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"row group 0 of .* is damaged"):
        list(parquet.read_row_group(path, 0, "text"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_memory_stays_far_below_one_row_group(tmp_path: Path) -> None:
    """96 MB of text in one row group; pyarrow's defaults need more than that on top."""
    path = tmp_path / "big.parquet"
    noise = np.random.Generator(np.random.Philox(key=1)).integers(97, 123, (24_000, 4_000), "u1")
    texts = pa.array([row.tobytes().decode() for row in noise])
    pq.write_table(pa.table({"text": texts}), path, row_group_size=24_000, use_dictionary=False)
    code = """
import sys
from pathlib import Path
from diffurefill.data import parquet
def peak_kb():  # ru_maxrss would count the parent's memory too
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak_kb()
count = sum(1 for _ in parquet.read_row_group(Path(sys.argv[1]), 0, "text"))
print(count, peak_kb() - before)
"""
    command = [sys.executable, "-c", code, str(path)]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    count, grown_kb = map(int, output.split())
    assert count == 24_000
    assert grown_kb < 48_000
