import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError
from diffurefill.data.tokens.fast_encoder import CHECKED_TEXTS
from diffurefill.data.tokens.tokenizer import load_tokenizer
from tests.data.tokens.kinds import KINDS, MODEL

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
MINICPM = SHARED / "tokenizer" / "minicpm4"
TEXTS = ["the cat sat on the mat", "<s> return self</s>", ""]


class FakeGigatoken:
    """The library's own encoder behind gigatoken's interface; specials in a text are specials."""

    def __init__(self, change: Callable[[list[int]], list[int]] = lambda ids: ids) -> None:
        self.change = change
        self.given: dict[str, Any] = {}
        self.encoded: list[str] = []

    def from_json(self, data: str) -> types.SimpleNamespace:
        self.given = json.loads(data)
        backend = Backend.from_str(data)

        def encode_batch_list(texts: list[str]) -> list[list[int]]:
            self.encoded += texts
            return [self.change(backend.encode(text).ids) for text in texts]

        return types.SimpleNamespace(encode_batch_list=encode_batch_list)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def put(fake: object) -> None:
        module = types.SimpleNamespace(Tokenizer=fake) if fake else None
        monkeypatch.setitem(sys.modules, "gigatoken", module)

    return put


@pytest.mark.parametrize("kind", KINDS)
def test_batches_go_through_the_fast_encoder_and_give_the_same_ids(
    install: Callable[[object], None], kind: str
) -> None:
    fake = FakeGigatoken()
    install(fake)
    tokenizer = KINDS[kind].with_phrases(["the cat"])
    fast = tokenizer.with_encoder("gigatoken", TEXTS)
    fake.encoded.clear()
    assert fast.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert fake.encoded == TEXTS
    assert fast.to_json() == tokenizer.to_json()
    # Another set of phrases keeps the encoder, and the reference can be had back.
    fast.with_phrases([]).encode_batch(TEXTS)
    assert fake.encoded == TEXTS * 2
    fast.with_encoder("tokenizers", []).encode_batch(TEXTS)
    assert fake.encoded == TEXTS * 2


def test_only_a_sample_is_checked(install: Callable[[object], None]) -> None:
    fake = FakeGigatoken()
    install(fake)
    MODEL.with_encoder("gigatoken", ["the cat"] * (CHECKED_TEXTS + 500))
    assert len(fake.encoded) == CHECKED_TEXTS + 24  # whole batches of 64


def test_an_encoder_with_other_ids_is_refused(install: Callable[[object], None]) -> None:
    install(FakeGigatoken(lambda ids: ids[:-1] if len(ids) > 3 else ids))
    with pytest.raises(UserError, match=r"gives text 70 other tokens.*data\.encoder"):
        MODEL.with_encoder("gigatoken", [*["cat"] * 70, "the cat sat on the mat"])


def test_without_the_package_the_message_says_what_to_install(
    install: Callable[[object], None],
) -> None:
    install(None)
    with pytest.raises(UserError, match=r"install diffurefill\[fast\], or set data\.encoder"):
        MODEL.with_encoder("gigatoken", TEXTS)


def test_a_tokenizer_it_cannot_follow_is_refused_in_one_line(
    install: Callable[[object], None],
) -> None:
    class Refuses:
        @staticmethod
        def from_json(data: str) -> None:
            raise ValueError("Unsupported pre_tokenizer\n\nLocation:\n    somewhere")

    install(Refuses)
    with pytest.raises(
        UserError, match=r"cannot follow this tokenizer \(Unsupported .*\)"
    ) as raised:
        MODEL.with_encoder("gigatoken", TEXTS)
    assert "\n" not in str(raised.value)


def test_without_text_to_check_it_is_not_used(install: Callable[[object], None]) -> None:
    install(FakeGigatoken())
    with pytest.raises(UserError, match="no text to check"):
        MODEL.with_encoder("gigatoken", [])


@pytest.mark.skipif(not MINICPM.exists(), reason="the shared MiniCPM4 tokenizer is not here")
def test_gigatoken_itself_gives_the_ids_of_minicpm4() -> None:
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer(MINICPM)
    fast = tokenizer.with_encoder("gigatoken", [*TEXTS, "<|im_end|> \u65e5\u672c\n\tx  y"])
    assert fast.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
