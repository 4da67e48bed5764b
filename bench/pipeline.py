"""The whole way from nine sources over HTTP to packed rows: memory, and tokens per CPU second.

    python bench/pipeline.py [--quick] [--encoder gigatoken]

Nine Parquet files, each a row group of 150 MB of text (--quick: 8 MB), lie behind a server on this
machine that takes 40 ms to answer. A fresh process mixes them by the shares of the report's Table
3, tokenises, looks for salient spans in a quarter of the rows and packs rows of 2,048 tokens;
`peak_mb` is all its memory. `share_of_core_35k` and `share_of_core_300k` say how much of one core
the path takes beside a training that uses 35,000 or 300,000 tokens a second.
`cpu_seconds_per_million` tells the parts apart, each measured alone in a process of its own on the
same documents. The text is the shared classics and wiki passages, the tokenizer MiniCPM4's, where
they are at hand; else the Python library and an 8,192-piece BPE of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from _common import ROOT, peak_mb, report
from diffurefill.config import DataConfig, Phase, Source
from diffurefill.data.cursors import Cursor
from diffurefill.data.documents import open_corpus, texts_of
from diffurefill.data.encoding import span_finder, with_encoder
from diffurefill.data.loader import Loader
from diffurefill.data.mixture import read_documents, slot_of
from diffurefill.data.sources import open_source
from diffurefill.data.tokens.tokenizer import load_tokenizer, train_tokenizer

SHARED = ROOT.parent / "shared" / "data"
SHARES = [0.18, 0.20, 0.15, 0.15, 0.08, 0.07, 0.08, 0.04, 0.05]
NAMES = [f"source{number}" for number in range(len(SHARES))]
PARTS = ("read", "tokenize", "spans", "all")


# --- the sources ----------------------------------------------------------------------------------


def some_texts() -> Iterator[str]:
    folders = [SHARED / "text" / name for name in ("classics", "wiki-passages")]
    paths = [str(folder) for folder in folders if folder.exists()] or ["python:"]
    return texts_of(open_source(Source(paths=tuple(paths)), num_slots=1), "bench")


def write_files(folder: Path, megabytes: int) -> None:
    """Every file begins elsewhere in the text, and every document says where it stands."""
    texts = [text[at : at + 3_000] for text in some_texts() for at in range(0, len(text), 3_000)]
    for number, name in enumerate(NAMES):
        start, size, rows = number * len(texts) // len(NAMES), 0, []
        for at, text in enumerate(islice(cycle(texts), start, None)):
            rows.append(f"{name}, part {at}. {text}")
            size += len(rows[-1])
            if size > megabytes * 1e6:
                break
        table = pa.table({"text": rows})
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", row_group_size=len(rows))
    path = SHARED / "tokenizer" / "minicpm4" / "tokenizer.json"
    tokenizer = load_tokenizer(path) if path.exists() else train_tokenizer(texts[:3000], 8192)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")


def config_of(url: str, encoder: str) -> DataConfig:
    return DataConfig(
        sources=tuple(Source(name=n, paths=(f"{url}/{n}.parquet",)) for n in NAMES),
        phases=(Phase(shares=tuple(zip(NAMES, SHARES, strict=True))),),
        row_length=2048,
        span_rows=0.25,
        num_slots=1,
        encoder=encoder,  # type: ignore[arg-type]
    )


# --- the process that is measured -----------------------------------------------------------------


def run_part(part: str, url: str, tokenizer_path: Path, encoder: str, num_rows: int) -> None:
    """One way, or a part of it, alone; its figures go to stdout as JSON."""
    data = config_of(url, encoder)
    corpus = open_corpus(data)
    tokenizer = with_encoder(load_tokenizer(tokenizer_path), data, corpus)
    if part == "all":
        figures = whole_way(data, corpus, tokenizer, num_rows)
    else:
        figures = {"cpu_seconds": one_part(part, data, corpus, tokenizer, num_rows)}
    print(json.dumps({**figures, "peak_mb": peak_mb()}))


def whole_way(data: DataConfig, corpus: Any, tokenizer: Any, num_rows: int) -> dict[str, Any]:
    began, cpu, first = time.perf_counter(), time.process_time(), 0.0
    shape = {"interval_rows": num_rows, "batch_rows": 8, "seed": 0, "slot": 0}
    with Loader(corpus, tokenizer, data=data, **shape) as loader:
        for rows in islice(loader, num_rows // 8):
            first = first or time.perf_counter() - began
            counts = rows.counts
    return {
        "tokens": counts.num_tokens,
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - began,
        "first_batch_seconds": round(first, 3),
        "padding_share": round(counts.padding_share, 4),
        "documents": sum(counts.documents.values()),
        "span_token_share": round(counts.num_span_tokens / counts.num_tokens, 4),
    }


def one_part(part: str, data: DataConfig, corpus: Any, tokenizer: Any, num_documents: int) -> float:
    slot, shares, find = slot_of(data, 0, 0), data.phase_at(0).shares, span_finder(data)
    documents = read_documents(corpus, shares, slot, Cursor())
    if part == "read":
        cpu = time.process_time()
        for _ in islice(documents, num_documents):
            pass
        return time.process_time() - cpu
    texts = [document.text for document in islice(documents, num_documents)]
    cpu = time.process_time()
    for start in range(0, len(texts), 64):
        if part == "tokenize":
            tokenizer.encode_batch(texts[start : start + 64])
        else:
            # Of the rows a quarter has spans; of a document's text, all.
            for text in texts[start : start + 64 : 4]:
                find(text)
    return time.process_time() - cpu


# --- the comparison -------------------------------------------------------------------------------


def child(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"the measured process ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, encoder: str, num_rows: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests.data.range_server import spawned

    with spawned(folder, latency=0.04) as url:
        common = ["--url", url, "--folder", str(folder), "--encoder", encoder]
        whole = child("--part", "all", "--rows", str(num_rows), *common)
        count = str(whole["documents"])
        parts = {p: child("--part", p, "--rows", count, *common) for p in PARTS if p != "all"}
    millions = whole["tokens"] / 1e6
    per_million = {p: round(f["cpu_seconds"] / millions, 3) for p, f in parts.items()}
    per_million["all"] = round(whole["cpu_seconds"] / millions, 3)
    rate = whole["tokens"] / whole["cpu_seconds"]
    return {
        "peak_mb": whole["peak_mb"],
        "tokens_per_cpu_second": round(rate),
        "share_of_core_35k": round(35_000 / rate, 3),
        "share_of_core_300k": round(300_000 / rate, 3),
        "cpu_seconds_per_million": per_million,
        **whole,
        "encoder": encoder,
        "num_sources": len(NAMES),
        "shared_text": SHARED.exists(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, few rows")
    parser.add_argument("--encoder", choices=("tokenizers", "gigatoken"), default="tokenizers")
    for hidden in ("--part", "--url", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        path = Path(arguments.folder, "tokenizer.json")
        run_part(arguments.part, arguments.url, path, arguments.encoder, arguments.rows)
        return
    megabytes, num_rows = (8, 200) if arguments.quick else (150, 4000)
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), megabytes)
        figures = measure(Path(name), arguments.encoder, num_rows)
    name = "pipeline" if arguments.encoder == "tokenizers" else f"pipeline_{arguments.encoder}"
    report(name, figures, quick=arguments.quick)


if __name__ == "__main__":
    main()
