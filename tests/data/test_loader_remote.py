"""T6 of the specification, through everything: rows from a server that fails are the same rows."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffurefill.config import DataConfig, Phase, Source
from diffurefill.data.documents import open_corpus
from diffurefill.data.loader import Loader
from diffurefill.data.packing import Rows
from diffurefill.data.storage import http, remote
from diffurefill.data.storage.patience import Patience
from diffurefill.data.tokens.tokenizer import Tokenizer
from tests.data.conftest import data_config, sentence
from tests.data.range_server import KINDS, Faults, serve

NAMES = ("web", "facts", "notes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        texts = [sentence(1000 * number + n) for n in range(600)]
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": texts}), path, row_group_size=300, data_page_size=2048)
    return tmp_path


def config_of(place: str) -> DataConfig:
    sources = tuple(Source(name=n, paths=(f"{place}/{n}.parquet",)) for n in NAMES)
    shares = (("web", 0.5), ("facts", 0.3), ("notes", 0.2))
    return replace(data_config("unused"), sources=sources, phases=(Phase(shares=shares),))


def rows_of(place: str, tokenizer: Tokenizer, prefetch: int) -> list[Rows]:
    data = config_of(place)
    shape = {"interval_rows": 40, "batch_rows": 4, "seed": 3, "slot": 1}
    with Loader(open_corpus(data), tokenizer, data=data, prefetch=prefetch, **shape) as loader:
        return list(islice(loader, 60))


def test_a_failing_server_changes_no_row(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = remote.open_remote
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(http, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(
        remote, "open_remote", lambda uri, _=None: real(uri, Patience(sleep=waits.append))
    )
    # Small reads, so that there are many requests to go wrong.
    monkeypatch.setattr(remote, "BUFFER_BYTES", 1 << 12)
    monkeypatch.setattr(remote, "JUMP_BYTES", 1 << 11)
    monkeypatch.setattr(http, "TAIL_BYTES", 1 << 11)
    kinds = tuple(kind for kind in KINDS if kind != "stall")
    with serve(folder, Faults(rate=0.2, seed=1, kinds=kinds)) as server:
        found = rows_of(server.url, tokenizer, prefetch=1)
        faults = [seen.fault for seen in server.requests if seen.fault]
    expected = rows_of(str(folder), tokenizer, prefetch=0)
    assert len(found) == len(expected) == 60
    for one, other in zip(found, expected, strict=True):
        assert one.position == other.position
        assert (one.ids == other.ids).all()
    assert len(faults) >= 5
    assert len(waits) >= len(faults) / 2
    http.close_client()
