"""One convention for BOS, text and EOS: in training's rows, in a probe, and in a prompt."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diffurefill.config import ProbeConfig
from diffurefill.data.cursors import Cursor
from diffurefill.data.documents import Corpus
from diffurefill.data.encoding import encode_documents
from diffurefill.data.mixture import Document
from diffurefill.decode.canvas import Specials, continuation
from diffurefill.evaluate.probe_sets import build_probe
from tests.data.conftest import all_texts, data_config
from tests.data.tokens.kinds import KINDS, every_kind
from tests.tiny import tiny_config


@every_kind
def test_a_document_has_the_same_ids_in_a_row_in_a_probe_and_in_a_prompt(
    kind: str, make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    tokenizer = KINDS[kind]
    corpus = make_corpus([60])
    documents = {text: tokenizer.document(text) for text in all_texts(corpus)}

    read = [Document(text, "text", Cursor(), Cursor()) for text in documents]
    trained_on = encode_documents(read, tokenizer, lambda text: [], frozenset())
    assert [document.ids.tolist() for document in trained_on] == list(documents.values())

    config = replace(tiny_config(tmp_path), data=data_config(tmp_path, row_length=256))
    config = replace(config, probe=ProbeConfig(num_rows=2))
    probe = build_probe(config, corpus, tokenizer)
    held_out = [documents[text] for text in documents if corpus.is_held_out(text)]
    for ids, doc_ids in zip(probe.ids, probe.doc_ids, strict=True):
        for document in range(doc_ids.max() + 1):
            assert ids[doc_ids == document].tolist() in held_out

    size = tokenizer.num_pieces + 2
    specials = Specials(
        *(tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id, tokenizer.pad_id),
        tokenizer.emittable(size),
    )
    for text, ids in documents.items():
        canvas = continuation([tokenizer.encode(text)], 3, specials, max_tokens=512)
        assert canvas.ids[0, :-3].tolist() == tokenizer.prompt(text) == ids[:-1]


def test_long_documents_are_not_encoded_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls = KINDS["trained"], []
    monkeypatch.setattr(
        tokenizer,
        "encode_batch",
        lambda texts: calls.append(list(map(len, texts))) or [[]] * len(texts),
    )
    lengths = [10] * 70 + [200_000] * 12 + [3]
    read = [Document("a" * n, "text", Cursor(), Cursor()) for n in lengths]
    found = list(encode_documents(read, tokenizer, lambda text: [], frozenset()))
    assert len(found) == len(lengths)
    assert [length for call in calls for length in call] == lengths
    assert list(map(len, calls)) == [64, 6 + 5, 5, 3]
