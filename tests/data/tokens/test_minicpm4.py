"""The MiniCPM4 tokenizer on real text: files as published, not shipped with the package."""

import inspect
import lzma
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from diffurefill.data.tokens import sentencepiece
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer
from tests.data.tokens.kinds import KINDS, MODEL

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
FOLDER = SHARED / "tokenizer" / "minicpm4"
FILES = sorted((SHARED / "text").glob("*/data/*.parquet"))

pytestmark = pytest.mark.skipif(
    not FOLDER.exists() or not FILES, reason="the shared tokenizer and texts are not here"
)

ODD = [
    "",
    " ",
    "\n\n\t x",
    "  two  spaces \u00a0\u3000 and no end ",
    "<s> </s> <unk> <|im_end|> <|fim_prefix|> <0x0A> <SEP> <td>",
    "\u65e5\u672c\u8a9e\u306f\u3001\u6c49\u5b57\u3002\u3002\u3002 \ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f469\u200d\U0001f680 e\u0301 \ufb01 \uff11\uff12",
    "1234567890 3.14159 1,000,000 0x1F 2026-11-05 ... --- ```",
    "\0\x01\x7f\ufeff\ufffd",
    "def f(x):\r\n\treturn x ** 2  # \u2264",
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some documents of every shared file, our own code, and odd ones."""
    found = []
    for path in FILES:
        batch = next(pq.ParquetFile(path).iter_batches(5, columns=["text"]))
        found += [text[:20_000] for text in batch.column(0).to_pylist()]
    with lzma.open(next((SHARED / "text").glob("*.xz")), "rt", encoding="utf-8") as file:
        found.append(file.read(50_000))
    return [*found, inspect.getsource(sentencepiece), *ODD]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


def test_the_folder_the_json_and_the_model_give_the_same_ids(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    from_model = load_tokenizer(FOLDER / "tokenizer.model")
    expected = tokenizer.encode_batch(texts)
    assert from_model.encode_batch(texts) == expected
    assert load_tokenizer(FOLDER / "tokenizer.json").encode_batch(ODD) == expected[-len(ODD) :]
    assert from_model.num_pieces == tokenizer.num_pieces
    assert from_model.emittable(73_760).tolist() == tokenizer.emittable(73_760).tolist()
    assert sum(map(len, expected)) > 30_000


def test_mask_and_pad_lie_above_the_added_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.num_pieces == 73_448
    assert (tokenizer.mask_id, tokenizer.pad_id) == (73_448, 73_449)
    assert tokenizer._backend.get_vocab_size(with_added_tokens=True) == 73_448
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    tokenizer.require_fits(73_760)
    allowed = tokenizer.emittable(73_760)
    assert not allowed[[0, tokenizer.bos_id, *range(73_440, 73_760)]].any()
    assert allowed[tokenizer.eos_id]


def test_a_text_begins_with_a_word_start(tokenizer: Tokenizer) -> None:
    assert tokenizer.document("The cat")[:2] == [1, 1507]
    assert tokenizer.prompt("The cat")[:2] == [1, 1507]
    assert tokenizer.encode_inner("The cat")[0] == 2219
    assert tokenizer.encode_inner(" Paris") == tokenizer.encode("in Paris")[1:]


def test_what_a_text_says_literally_is_ordinary_text(tokenizer: Tokenizer) -> None:
    for text in ODD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert max(tokenizer.encode(text), default=3) < 73_440
        assert min(tokenizer.encode(text), default=3) > 2


@pytest.mark.parametrize("kind", ["minicpm4", "trained", "byte level"])
def test_byte_ends_agree_with_the_library_s_offsets(
    tokenizer: Tokenizer, texts: list[str], kind: str
) -> None:
    chosen = {"minicpm4": tokenizer, "trained": MODEL, "byte level": KINDS["byte level"]}[kind]
    for text in texts[::3] + ODD:
        encoding = chosen._backend.encode(text, add_special_tokens=False)
        ends = chosen.byte_ends(encoding.ids, text)
        assert ends is not None
        # Bytes of one character all have the offsets of that character.
        char_ends = np.cumsum([0, *(len(char.encode()) for char in text)])
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        first, last = char_ends[np.maximum(offsets[:, 1] - 1, 0)], char_ends[offsets[:, 1]]
        inside_a_character = ~np.isin(ends, char_ends)
        is_word_start = ends == 0  # a piece of its own, which the library gives the first character
        assert is_word_start.sum() <= 1
        assert (ends == last)[~inside_a_character & ~is_word_start].all()
        assert ((first < ends) & (ends < last))[inside_a_character].all()


def test_phrases_keep_every_text_and_make_it_shorter(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    with_phrases = tokenizer.with_phrases(["of the", "in the", "Once upon", "New York"])
    sample = texts[::5] + ODD
    encoded = with_phrases.encode_batch(sample)
    assert [with_phrases.decode(ids) for ids in encoded] == sample
    assert sum(map(len, encoded)) < sum(map(len, tokenizer.encode_batch(sample))) - 30
    assert with_phrases.mask_id == 73_452
    for text, ids in zip(sample, encoded, strict=True):
        ends = with_phrases.byte_ends(ids, text)
        assert ends is not None
