import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffurefill.config import DataConfig, Phase, Source, UserError
from diffurefill.data import documents
from diffurefill.data.cursors import SourceCursor
from diffurefill.data.documents import (
    Corpus,
    held_out_documents,
    open_corpus,
    pin_sources,
    text_key,
    texts_of,
    training_texts,
)
from diffurefill.data.slots import Slot, read_source
from tests.data.conftest import HELD_OUT, all_texts, data_config, sentence

MakeCorpus = Callable[..., Corpus]
DATA = data_config("unused")


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def trained_on(corpus: Corpus, num_slots: int = 2) -> set[str]:
    """Every document that any slot gives in its first epoch."""
    found = set()
    for source in corpus.sources.values():
        for number in range(num_slots):
            slot = Slot(number, num_slots, 0)
            for text, after in read_source(source, slot, SourceCursor(), corpus.is_held_out):
                if after.epoch:
                    break
                found.add(text)
    return found


# --- the split -----------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0.001, 0.5))
def test_the_split_depends_on_the_text_alone(text: str, fraction: float) -> None:
    plain = " ".join(text.casefold().split())
    share = int(hashlib.sha256(plain.encode()).hexdigest()[:16], 16) / 2**64
    assert Corpus({}, (), frozenset(), fraction).is_held_out(text) == (share < fraction)


def test_a_copy_with_other_blanks_or_letter_case_is_a_copy() -> None:
    assert text_key("The  Owl\n\nran.") == text_key("the owl ran. ")
    assert text_key("The owl ran.") != text_key("The owl runs.")


def test_about_the_asked_share_is_held_out() -> None:
    corpus = Corpus({}, (), frozenset(), 0.1)
    held_out = sum(corpus.is_held_out(f"document {n}") for n in range(10_000))
    assert 900 < held_out < 1_100


def test_no_training_reader_ever_sees_a_held_out_document(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([30, 30], 3)
    held_out = set(held_out_documents(corpus, DATA))
    assert held_out
    assert held_out.isdisjoint(trained_on(corpus, 3))
    assert held_out.isdisjoint(training_texts(corpus, DATA, 10**6))


def test_held_out_and_training_documents_together_are_the_corpus(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([30, 30])
    both = [*held_out_documents(corpus, DATA), *training_texts(corpus, DATA, 10**6)]
    assert sorted(both) == sorted(all_texts(corpus))


def test_planted_copies_of_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    """Planted in another source, and reflowed or lower-cased there."""
    web = write_jsonl(tmp_path / "web.jsonl", [sentence(n) for n in range(60)])
    plain = data_config(web)
    held_out = list(held_out_documents(open_corpus(plain), plain))
    copies = [held_out[0], held_out[1].upper(), held_out[2].replace(" ", "\n"), f" {held_out[3]} "]
    planted = write_jsonl(tmp_path / "facts.jsonl", [*copies, *(f"fact {n}" for n in range(20))])
    sources = tuple(Source(name=p.stem, paths=(str(p),)) for p in (web, planted))
    phases = (Phase(shares=(("web", 0.5), ("facts", 0.5))),)
    data = replace(plain, sources=sources, phases=phases)
    seen = trained_on(open_corpus(data))
    assert len(seen) > 40
    assert seen.isdisjoint({*held_out, *copies})
    # With another held-out share alone they are ordinary documents: the test can fail.
    other = replace(data, held_out_fraction=1e-9)
    assert set(copies) <= trained_on(open_corpus(other))


def test_documents_of_a_probe_source_are_never_trained_on(tmp_path: Path) -> None:
    texts = [sentence(n) for n in range(40)]
    web = write_jsonl(tmp_path / "web.jsonl", texts)
    probe = write_jsonl(tmp_path / "probe.jsonl", [texts[3].upper(), texts[7], "only in the probe"])
    plain = replace(data_config(web), held_out_fraction=1e-9)
    assert {texts[3], texts[7]} <= trained_on(open_corpus(plain))
    data = replace(plain, probe_sources=(Source(name="wiki", paths=(str(probe),)),))
    corpus = open_corpus(data)
    assert trained_on(corpus) == set(texts) - {texts[3], texts[7]}
    assert {texts[3], texts[7]}.isdisjoint(training_texts(corpus, data, 10**6))
    assert set(held_out_documents(corpus, data)) == set(texts_of(corpus.probe_sources[0]))


def test_a_text_that_stands_twice_is_probed_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [sentence(n % 20) for n in range(60)])
    data = data_config(path)
    found = list(held_out_documents(open_corpus(data), data))
    assert len(found) == len(set(found)) > 0


def test_no_held_out_document_at_all_is_an_error(tmp_path: Path) -> None:
    data = replace(data_config(write_jsonl(tmp_path / "a.jsonl", ["x"])), held_out_fraction=1e-9)
    with pytest.raises(UserError, match=r"raise data\.held_out_fraction"):
        list(held_out_documents(open_corpus(data), data))


def test_the_probe_draws_from_the_sources_by_their_shares(tmp_path: Path) -> None:
    paths = {
        name: write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {n}" for n in range(1000)])
        for name in ("web", "facts", "later")
    }
    sources = tuple(Source(name=n, paths=(str(p),)) for n, p in paths.items())
    first = Phase(shares=(("web", 0.8), ("facts", 0.2)))
    data = replace(
        DATA, sources=sources, phases=(first, Phase(from_step=9, shares=(("later", 1.0),)))
    )
    found = list(islice(held_out_documents(open_corpus(data), data), 150))
    share = sum(text.startswith("web") for text in found) / len(found)
    assert 0.7 < share < 0.9
    assert not any(text.startswith("later") for text in found)


def test_the_sample_takes_from_every_unit_and_stays_within_its_size(
    make_corpus: MakeCorpus,
) -> None:
    corpus = make_corpus([50] * 6)
    sample = list(training_texts(corpus, DATA, 6_000))
    assert 4_000 < sum(map(len, sample)) <= 6_000
    assert sample == list(training_texts(corpus, DATA, 6_000))
    texts = all_texts(corpus)
    units = [set(texts[start : start + 50]) for start in range(0, 300, 50)]
    assert all(any(text in unit for text in sample) for unit in units)


# --- the corpus ----------------------------------------------------------------------------------


def test_the_fingerprint_ignores_where_files_lie_and_sees_their_size(tmp_path: Path) -> None:
    prints = []
    for folder, text in [("here", "abc"), ("there", "abc"), ("other", "abcd")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
        prints.append(open_corpus(data_config(tmp_path / folder)).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64


def test_the_fingerprint_sees_a_probe_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    probe = Source(name="probe", paths=(str(write_jsonl(tmp_path / "p.jsonl", ["z"])),))
    plain = data_config(path)
    changed = replace(plain, probe_sources=(probe,))
    assert open_corpus(plain).fingerprint != open_corpus(changed).fingerprint


def test_a_file_named_by_two_paths_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    monkeypatch.chdir(tmp_path)
    data = data_config(path, tmp_path)
    spelt = (str(path), str(tmp_path), "a.jsonl", "./a.jsonl", ".", "*.jsonl")
    source = replace(data.sources[0], paths=spelt)
    assert open_corpus(replace(data, sources=(source,))).num_units == 1


@pytest.mark.parametrize("content", ["", " \n\n "])
def test_a_source_without_text_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match="no text in the data source 'text'"):
        open_corpus(data_config(tmp_path / "a.txt"))


def test_pinning_reaches_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "pinned", lambda path: path.replace("@main", "@commit"))
    source = Source(paths=("hf://datasets/a/b@main", "c@main"))
    data = DataConfig(sources=(source,), probe_sources=(Source(name="p", paths=("d@main",)),))
    fixed = pin_sources(data)
    assert fixed.sources[0].paths == ("hf://datasets/a/b@commit", "c@commit")
    assert fixed.probe_sources[0].paths == ("d@commit",)


def test_held_out_fraction_comes_from_the_configuration(make_corpus: MakeCorpus) -> None:
    assert make_corpus([5]).held_out_fraction == HELD_OUT


def test_the_fingerprint_sees_the_list_of_collocations(tmp_path: Path) -> None:
    path, words = write_jsonl(tmp_path / "a.jsonl", ["x", "y"]), tmp_path / "words.txt"
    prints = []
    for content in ("one list", "another"):
        words.write_text(content)
        data = replace(data_config(path), collocations=str(words))
        prints.append(open_corpus(data).fingerprint)
    assert len({*prints, open_corpus(data_config(path)).fingerprint}) == 3
