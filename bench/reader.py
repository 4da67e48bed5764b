"""Reading a Parquet file with one large row group: memory, first document, going on from a place.

    python bench/reader.py [--quick] [--datasets-python PATH]    (or DATASETS_PYTHON=PATH)

The file is one row group of 2 GB of text (--quick: 100 MB) in pages as pyarrow makes them, zstd:
documents of 2.7 kB on average, cut out of the Python library's source. It is read to its end, on
the disk and from a range server on this machine, by our reader; and on the disk by pyarrow with its
defaults, and by `datasets` streaming, if PATH is a Python that has it (this one is looked at, too).
A second file holds a quarter of the text in a single page.

Every run is a process of its own and starts with the file out of the page cache. Peak memory is
resident memory of the process, interpreter and imports included. First documents and resumes are
medians of five runs, from the call that opens the file to the document, imports left out; a resume
goes on behind two thirds of the rows. Runs to the end must agree on their texts. Ratios are theirs
over ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from _common import ROOT, peak_mb, report

FULL_MB, QUICK_MB = 2000, 100
MEAN_BYTES = 2700
REPEATS = 5
SEED = 0

# --- the files ------------------------------------------------------------------------------------


def write_files(folder: str, megabytes: int) -> None:
    """`rows.parquet` and `page.parquet`; takes memory of twice the text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array(documents(megabytes * 10**6))
    table = pa.table({"id": range(len(texts)), "text": texts})
    size = len(table)
    pq.write_table(table, f"{folder}/rows.parquet", row_group_size=size, compression="zstd")
    pq.write_table(
        table.slice(0, size // 4),
        f"{folder}/page.parquet",
        row_group_size=size,
        compression="zstd",
        use_dictionary=False,
        data_page_size=1 << 30,
        max_rows_per_page=1 << 30,
    )
    for path in Path(folder).glob("*.parquet"):
        with open(path, "rb") as f:
            os.fsync(f.fileno())


def documents(num_bytes: int) -> Iterator[str]:
    """Runs of lines of the Python library, as different in size as web pages are."""
    import sysconfig

    from diffurefill.runtime import philox

    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    library = "".join(path.read_text("utf-8", "replace") for path in paths)
    rng = philox("reader bench", SEED)
    while num_bytes > 0:
        # The mean of a lognormal distribution is e^(1/2) times its median.
        size = int(rng.lognormal() * MEAN_BYTES / 1.65)
        start = library.find("\n", int(rng.integers(len(library) - size - 1000))) + 1
        num_bytes -= size
        yield library[start : start + size]


# --- the readers ----------------------------------------------------------------------------------


def read_ours(uri: str, figures: dict[str, Any], mark: list[int] | None) -> Iterator[str | None]:
    from diffurefill.data.formats.marks import Mark
    from diffurefill.data.formats.parquet import read_rows
    from diffurefill.data.storage.files import open_file

    if "://" in uri:  # which open_file would import
        from diffurefill.data.storage import remote  # noqa: F401

    def read() -> Iterator[str | None]:
        file = open_file(uri)
        counted = Counted(file, figures)
        start = Mark(*mark) if mark else Mark()
        marks = figures.setdefault("marks", [])
        for text, after in read_rows(counted, "text", None, start):
            if after.row % 1000 == 1 and marks:
                marks[-1]["crc"] = zlib.crc32((text or "").encode())
            yield text
            if after.row % 1000 == 0:
                marks.append({"mark": after, "crc": None})
        file.close()

    return read()


class Counted:
    """A RandomAccess; what is asked of it goes to `figures`, in MB."""

    def __init__(self, file: Any, figures: dict[str, Any]) -> None:
        self._file, self._figures, self.uri, self.size = file, figures, file.uri, file.size
        figures["read_mb"] = 0.0

    def read_at(self, offset: int, length: int) -> bytes:
        data = self._file.read_at(offset, length)
        self._figures["read_mb"] += len(data) / 1e6
        return data


def read_by_pyarrow(path: str, *_: object) -> Iterator[str]:
    import pyarrow.parquet as pq

    def read() -> Iterator[str]:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.column("text").to_pylist()

    return read()


def read_by_datasets(path: str, *_: object) -> Iterator[str]:
    import datasets

    def read() -> Iterator[str]:
        rows = datasets.load_dataset(
            "parquet", data_files=path, split="train", streaming=True, columns=["text"]
        )
        for row in rows:
            yield row["text"]

    return read()


READERS: dict[str, Callable[..., Iterator[str | None]]] = {
    "ours": read_ours,
    "pyarrow": read_by_pyarrow,
    "datasets": read_by_datasets,
}
"""Imports come with the call, the rest with the first document."""


def run_child(reader: str, uri: str, mark: list[int] | None, is_first_only: bool) -> None:
    """One run; its figures go to stdout as JSON."""
    # Should memory run out, this process is the one to end.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if "://" not in uri:
        with open(uri, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    figures: dict[str, Any] = {}
    texts = READERS[reader](uri, figures, mark)
    imports_mb, began, cpu_before = peak_mb(), time.perf_counter(), time.process_time()
    first = next(texts) or ""
    figures["first_seconds"] = time.perf_counter() - began
    figures["first_read_mb"] = figures.get("read_mb")
    figures["first_crc"] = zlib.crc32(first.encode())
    if not is_first_only:
        count, characters, crc = 1, len(first), 0
        for text in texts:
            count += 1
            characters += len(text or "")
            if count % 100 == 0:
                crc = zlib.crc32((text or "").encode(), crc)
        figures["documents"], figures["characters"], figures["crc"] = count, characters, crc
        figures["cpu_seconds"] = time.process_time() - cpu_before
        figures["seconds"] = time.perf_counter() - began
    if marks := figures.pop("marks", []):
        figures["resume"] = marks[len(marks) * 2 // 3]
    figures["imports_mb"], figures["peak_mb"] = imports_mb, peak_mb()
    packages = ["pyarrow"] + ["datasets"] * (reader == "datasets")
    figures["versions"] = {name: metadata.version(name) for name in packages}
    print(json.dumps(figures))


# --- the comparison -------------------------------------------------------------------------------


def measure(
    reader: str,
    uri: str,
    *,
    python: str = sys.executable,
    mark: list[int] | None = None,
    is_first_only: bool = False,
) -> dict[str, Any]:
    command = [python, __file__, "--reader", reader, "--uri", uri]
    command += ["--mark", json.dumps(mark)] + ["--first-only"] * is_first_only
    with tempfile.TemporaryDirectory() as cache:
        offline = {"HF_HOME": cache, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **offline}
        )
    if done.returncode:
        raise SystemExit(f"{reader} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    shown = {key: round(v, 3) for key, v in figures.items() if isinstance(v, float)}
    print(f"{reader:>10} {'' if mark is None else 'resume '}{shown}", file=sys.stderr)
    return figures


def compare(folder: Path, url: str, datasets_python: str | None) -> dict[str, Any]:
    rows = str(folder / "rows.parquet")
    places = {"": rows, "_http": f"{url}/rows.parquet"}
    runs = {f"ours{place}": measure("ours", uri) for place, uri in places.items()}
    runs["pyarrow_default"] = measure("pyarrow", rows)
    if datasets_python:
        runs["datasets"] = measure("datasets", rows, python=datasets_python)
    if len({(run["documents"], run["characters"], run["crc"]) for run in runs.values()}) != 1:
        raise SystemExit("the readers do not agree on the texts")
    runs["ours_one_page"] = measure("ours", str(folder / "page.parquet"))

    resume = runs["ours"].pop("resume")
    figures: dict[str, Any] = {}
    for place, uri in places.items():
        runs[f"ours{place}"].pop("resume", None)
        firsts = [measure("ours", uri, is_first_only=True) for _ in range(REPEATS)]
        resumes = [
            measure("ours", uri, is_first_only=True, mark=resume["mark"]) for _ in range(REPEATS)
        ]
        if {run["first_crc"] for run in resumes} != {resume["crc"]}:
            raise SystemExit("reading went on with another document than the next")
        figures |= {
            f"peak_mb{place}": runs[f"ours{place}"]["peak_mb"],
            f"first_document_seconds{place}": median(firsts, "first_seconds"),
            f"first_document_mb{place}": median(firsts, "first_read_mb"),
            f"resume_milliseconds{place}": round(1000 * median(resumes, "first_seconds"), 1),
            f"resume_mb{place}": median(resumes, "first_read_mb"),
        }
    runs["ours_one_page"].pop("resume", None)
    for name in ("pyarrow_default", "datasets"):
        theirs = runs.get(name)
        ratio = round(theirs["peak_mb"] / figures["peak_mb"], 1) if theirs else None
        figures[f"memory_ratio_{name}"] = ratio
    return {
        **figures,
        "documents_per_cpu_second": {
            name: round(run["documents"] / run["cpu_seconds"]) for name, run in runs.items()
        },
        "peak_mb_one_page": runs["ours_one_page"]["peak_mb"],
        "imports_mb": runs["ours"]["imports_mb"],
        "file_mb": round(os.path.getsize(rows) / 1e6, 1),
        "seed": SEED,
        "runs": runs,
    }


def median(runs: list[dict[str, Any]], figure: str) -> float:
    return round(statistics.median(run[figure] for run in runs), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file, under a minute")
    parser.add_argument(
        "--datasets-python",
        default=os.environ.get("DATASETS_PYTHON"),
        help="a Python that has the package `datasets`; default: $DATASETS_PYTHON, or this one",
    )
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    parser.add_argument("--mark", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--first-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    megabytes = QUICK_MB if arguments.quick else FULL_MB
    if arguments.reader:
        run_child(arguments.reader, arguments.uri, arguments.mark, arguments.first_only)
        return
    if arguments.write:
        write_files(arguments.write, megabytes)
        return
    has_datasets = importlib.util.find_spec("datasets") is not None
    python = arguments.datasets_python or (sys.executable if has_datasets else None)
    sys.path.insert(0, str(ROOT))
    from tests.data.range_server import spawned

    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory ends with it.
        size = ["--quick"] * arguments.quick
        subprocess.run([sys.executable, __file__, "--write", folder, *size], check=True)
        with spawned(Path(folder)) as url:
            figures = compare(Path(folder), url, python)
    report("reader", figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
