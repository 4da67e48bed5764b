"""Probe sets: each made of its own text, kept in one file, told apart by its digest."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from diffurefill.config import HELD_OUT, SHORT, ProbeConfig, RunConfig, Source, UserError
from diffurefill.data.documents import Corpus, open_corpus
from diffurefill.data.tokens.tokenizer import Tokenizer
from diffurefill.evaluate.probe_sets import (
    build_probe,
    build_probes,
    load_probes,
    packed_probe,
    sample_pieces,
    save_probes,
    short_probe,
)
from diffurefill.evaluate.probes import draw_masks
from diffurefill.train.loop import make_tokenizer
from tests.tiny import tiny_config, write_corpus

WIKI = "Wikipedia is an encyclopaedia that anyone can edit, entry {}."


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("sets")
    wiki = folder / "wiki.txt"
    wiki.write_text("\n\n".join(WIKI.format(n) for n in range(60)))
    config = tiny_config(write_corpus(folder))
    data = replace(config.data, probe_sources=(Source(name="wiki", paths=(str(wiki),)),))
    probe = ProbeConfig(num_rows=4, sets=("wiki",), short_length=8)
    return replace(config, data=data, probe=probe)


@pytest.fixture(scope="module")
def corpus(config: RunConfig) -> Corpus:
    return open_corpus(config.data)


@pytest.fixture(scope="module")
def tokenizer(config: RunConfig, corpus: Corpus) -> Tokenizer:
    return make_tokenizer(config, corpus)


def test_every_set_reads_its_own_text(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    probes = build_probes(config, corpus, tokenizer)
    assert list(probes) == [HELD_OUT, SHORT, "wiki"]
    texts = {name: tokenizer.decode(probe.ids.ravel()) for name, probe in probes.items()}
    assert "Wikipedia" in texts["wiki"]
    assert "fox" not in texts["wiki"]
    assert "Wikipedia" not in texts[HELD_OUT] + texts[SHORT]
    assert {probe.ids.shape[0] for n, probe in probes.items() if n != SHORT} == {4}
    assert len({probe.digest for probe in probes.values()}) == 3


def test_the_short_rows_are_starts_of_held_out_documents(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    short = build_probes(config, corpus, tokenizer)[SHORT]
    assert short.ids.shape[1] == 8
    assert len(short.ids) <= 4 * config.data.row_length // 8
    assert (short.ids[:, 0] == tokenizer.bos_id).all()
    assert not any(mask[:, 0].any() for mask in short.masks.values())
    assert set(np.unique(short.doc_ids)) <= {-1, 0}
    assert ((short.doc_ids < 0) == (short.ids == tokenizer.pad_id)).all()


def test_the_masks_of_a_set_are_drawn_apart_from_those_of_the_held_out_rows(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    probes, bos_id = build_probes(config, corpus, tokenizer), tokenizer.bos_id
    for name, probe in probes.items():
        shared = draw_masks(probe.ids, probe.doc_ids, config.probe, seed=config.seed, bos_id=bos_id)
        assert (shared.digest == probe.digest) == (name == HELD_OUT)


def test_a_start_that_was_cut_shows_its_last_token(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    probe = replace(config.probe, mask_rates=(0.5, 1 - 1e-9), decoding_mask_rate=1 - 1e-9)
    short = build_probes(replace(config, probe=probe), corpus, tokenizer)[SHORT]
    assert (short.doc_ids[:, -1] == 0).all(), "all of them are longer"
    for mask in (*short.masks.values(), short.decoding_mask):
        assert not mask[:, -1].any()
    assert short.masks[1 - 1e-9][:, 1:-1].all()
    # A document that ends has its EOS to say.
    asked = replace(config, probe=replace(probe, short_length=24))
    pieces = sample_pieces(["the fox."], asked, tokenizer, HELD_OUT)
    whole = short_probe(pieces, asked, tokenizer)
    assert whole is not None
    ended = whole.ids == tokenizer.eos_id
    assert ended.sum() == 1
    assert whole.masks[1 - 1e-9][ended].all()


def test_rows_no_longer_than_the_short_length_have_no_short_set(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    long = replace(config, probe=replace(config.probe, short_length=32))
    assert list(build_probes(long, corpus, tokenizer)) == [HELD_OUT, "wiki"]


def test_another_set_leaves_the_held_out_probe_as_it_was(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    """The wiki source holds none of the training documents, so what is held out is the same."""
    plain = replace(
        config, data=replace(config.data, probe_sources=()), probe=ProbeConfig(num_rows=4)
    )
    alone = build_probe(plain, open_corpus(plain.data), tokenizer)
    assert build_probes(config, corpus, tokenizer)[HELD_OUT].digest == alone.digest


def test_a_probe_source_that_is_no_set_is_the_held_out_text(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    together = replace(config, probe=ProbeConfig(num_rows=4))
    held_out = build_probes(together, corpus, tokenizer)[HELD_OUT]
    assert "Wikipedia" in tokenizer.decode(held_out.ids.ravel())


def test_the_file_gives_every_set_back(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    probes = build_probes(config, corpus, tokenizer)
    save_probes(tmp_path / "p", probes, tokenizer.vocabulary_digest)
    again = load_probes(tmp_path / "p", tokenizer.vocabulary_digest)
    assert {n: p.digest for n, p in again.items()} == {n: p.digest for n, p in probes.items()}
    assert next(iter(again)) == HELD_OUT


def test_a_file_of_the_time_of_one_probe_is_still_read(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    probe = build_probe(config, corpus, tokenizer)
    save_file({k: np.ascontiguousarray(v) for k, v in probe.arrays().items()}, tmp_path / "p")
    assert load_probes(tmp_path / "p", "any")[HELD_OUT].digest == probe.digest


def test_a_file_of_another_vocabulary_is_refused(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_probes(tmp_path / "p", build_probes(config, corpus, tokenizer), "another")
    with pytest.raises(UserError, match="another vocabulary"):
        load_probes(tmp_path / "p", tokenizer.vocabulary_digest)


def test_what_is_no_probe_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    save_file({"weights": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        load_probes(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read"):
        load_probes(tmp_path / "text")
    with pytest.raises(UserError, match="not a probe file"):
        load_probes(tmp_path / "model.safetensors")


def test_weights_in_bfloat16_are_no_probe_file(tmp_path: Path) -> None:
    save_torch_file({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"cannot read the probe file .*model\.safetensors"):
        load_probes(tmp_path / "model.safetensors")


MASK = np.zeros((2, 3), np.bool_)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask_x": MASK}, {"mask_nan": MASK}, {"mask_2": MASK}, {"mask_0.5": MASK[0]},
        {"decoding": MASK.astype(np.float32)}, {"ids": np.full((2, 3), -1)},
        {"ids": np.zeros((2, 4), np.int64)}, {"ids": np.zeros((2, 3), np.float32)},
    ],
)  # fmt: skip
def test_arrays_that_are_of_no_probe_are_refused(tmp_path: Path, wrong: dict) -> None:
    ids, doc_ids = np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int32)
    good = {"ids": ids, "doc_ids": doc_ids, "decoding": MASK, "mask_0.5": MASK}
    save_file(good, tmp_path / "p")
    assert load_probes(tmp_path / "p")
    save_file(good | wrong, tmp_path / "p")
    with pytest.raises(UserError, match="not a probe file that this version reads"):
        load_probes(tmp_path / "p")


def test_a_set_without_a_source_is_a_mistake(config: RunConfig) -> None:
    with pytest.raises(UserError, match=r"probe\.sets names code"):
        replace(config, probe=ProbeConfig(sets=("wiki", "code")))
    with pytest.raises(UserError, match="cannot be the name"):
        ProbeConfig(sets=("short",))


def test_a_source_with_too_little_text_is_named(config: RunConfig, tokenizer: Tokenizer) -> None:
    many = replace(config, probe=replace(config.probe, num_rows=1000))
    with pytest.raises(UserError, match=r"held.out"):
        build_probes(many, open_corpus(many.data), tokenizer)
    with pytest.raises(UserError, match=r"probe wiki: its text fills 0 .*lower probe\.num") as said:
        packed_probe([], config, tokenizer, "wiki")
    assert "held_out_fraction" not in str(said.value)


def test_the_vocabulary_s_digest_is_of_pieces_and_ids(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.vocabulary_digest == tokenizer.vocabulary_digest
    assert tokenizer.with_phrases(["quick brown"]).vocabulary_digest != tokenizer.vocabulary_digest
