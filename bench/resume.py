"""Kill -9 at random moments, and the row stream that comes of it.

    python bench/resume.py [--quick]

A process reads rows from a mixture of Parquet, JSONL, compressed JSONL and text, with short rows,
salient spans and three phases, and notes each batch's sha256 and position in a file that it syncs.
It is killed at random moments, 100 times (--quick: 8), and every time started again from the last
whole line, with another read-ahead. `identical` says whether the noted stream is, batch by batch,
that of a process which was never stopped; exit code 1 when it is not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from _common import report
from diffurefill.config import DataConfig, Phase, Source
from diffurefill.data.documents import open_corpus
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Position, Rows
from diffurefill.data.tokens.tokenizer import load_tokenizer, train_tokenizer

INTERVAL_ROWS, BATCH_ROWS = 24, 4
WORDS = ["owl", "Anna Lee", "river", "1903", "quiet", "lamp", "over", "Paris", "ran", "while"]
SEED = 7
FILES = {"web": "web.parquet", "facts": "facts.jsonl", "qa": "qa.jsonl.zst", "notes": "notes.txt"}
TOKENIZER, NOTED = "tokenizer.json", "noted.jsonl"


def sentence(number: int) -> str:
    words = [WORDS[(number * 7 + at * 3) % len(WORDS)] for at in range(number * 11 % 60)]
    return f"Text {number}: {' '.join(words)}."


def write_sources(folder: Path) -> None:
    texts = [sentence(number) for number in range(6000)]
    table = pa.table({"text": texts[:3000]})
    pq.write_table(table, folder / FILES["web"], row_group_size=1500, data_page_size=4096)
    lines = [json.dumps({"text": text}) for text in texts[3000:]]
    (folder / FILES["facts"]).write_text("\n".join(lines[:1000]))
    packed = pa.compress("\n".join(lines[1000:2000]).encode(), "zstd", asbytes=True)
    (folder / FILES["qa"]).write_bytes(packed)
    (folder / FILES["notes"]).write_text("\n\n".join(texts[5000:]))
    tokenizer = train_tokenizer(texts[:500], 400)
    (folder / TOKENIZER).write_text(tokenizer.to_json(), "utf-8")


def config_of(folder: Path) -> DataConfig:
    return DataConfig(
        sources=tuple(Source(name=n, paths=(str(folder / f),)) for n, f in FILES.items()),
        phases=(
            Phase(shares=(("web", 1.0),)),
            Phase(from_step=40, shares=(("web", 0.4), ("facts", 0.3), ("qa", 0.3))),
            Phase(from_step=90, shares=(("facts", 0.5), ("qa", 0.3), ("notes", 0.2))),
        ),
        num_slots=2,
        row_length=128,
        short_rows=0.2,
        short_length=32,
        span_rows=0.3,
    )


def open_loader(folder: Path, position: Position | None, prefetch: int) -> Loader:
    data = config_of(folder)
    return Loader(
        open_corpus(data),
        load_tokenizer(folder / TOKENIZER),
        data=data,
        seed=SEED,
        slot=1,
        interval_rows=INTERVAL_ROWS,
        batch_rows=BATCH_ROWS,
        position=position,
        prefetch=prefetch,
    )


def note_of(rows: Rows) -> dict[str, Any]:
    columns = (rows.ids, rows.doc_ids, rows.span_ids, rows.part_lengths)
    digest = hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()
    return {"sha256": digest, "position": rows.position.to_json()}


# --- the process that is killed -------------------------------------------------------------------


def read_on(folder: Path, prefetch: int) -> None:
    """Go on after the last whole line, without end."""
    noted = whole_lines(folder)
    position = Position.from_json(noted[-1]["position"]) if noted else None
    with (
        open(folder / NOTED, "a", encoding="utf-8") as file,
        open_loader(folder, position, prefetch) as loader,
    ):
        for rows in loader:
            file.write(json.dumps(note_of(rows)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def whole_lines(folder: Path) -> list[dict[str, Any]]:
    """The notes so far; a line that a kill cut short is taken out of the file."""
    path = folder / NOTED
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


# --- the one who kills ----------------------------------------------------------------------------


def one_life(folder: Path, prefetch: int, seconds: float) -> None:
    """Let a process read until it has noted something and `seconds` more."""
    size = (folder / NOTED).stat().st_size if (folder / NOTED).exists() else 0
    command = [sys.executable, __file__, "--folder", str(folder), "--prefetch", str(prefetch)]
    process = subprocess.Popen(command)
    try:
        while not (folder / NOTED).exists() or (folder / NOTED).stat().st_size <= size:
            if process.poll() is not None:
                raise SystemExit(f"the reading process ended by itself with {process.returncode}")
            time.sleep(0.002)
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 kills")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prefetch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        read_on(arguments.folder, arguments.prefetch)
        return
    kills, chance = 8 if arguments.quick else 100, random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder)
        for number in range(kills):
            one_life(folder, chance.choice((0, 1, 4)), chance.uniform(0.0, 0.05))
            print(f"kill {number + 1}/{kills}: {len(whole_lines(folder))} batches", file=sys.stderr)
        noted = whole_lines(folder)
        with open_loader(folder, None, 0) as loader:
            unbroken = [note_of(rows) for rows in islice(loader, len(noted))]
    identical, last = noted == unbroken, noted[-1]["position"]
    epochs = {name: cursor[0] for name, cursor in last["cursor"]["sources"].items()}
    figures = {"kills": kills, "batches": len(noted), "identical": identical, "epochs": epochs}
    report("resume", {**figures, "steps": last["step"], "seed": SEED}, quick=arguments.quick)
    sys.exit(not identical)


if __name__ == "__main__":
    main()
