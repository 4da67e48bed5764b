"""Small tokenizers of every kind that real ones have."""

import json

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from diffurefill.data.tokens.tokenizer import Tokenizer, train_tokenizer

SPACE = "\u2581"
CODE = "def add(self, x):\n    if x > 0:\n        return self.total + x\n\n\nclass Sum:\n" * 20
MODEL = train_tokenizer([CODE, "the cat sat on the mat; the hat sat on the cat. " * 20], 420)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
tricky_text = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<0x0A>", "\u2581", " ", "\n", "\t", "\r\n", "\0", "a", "\u00e9"]
    )
).map("".join)


def with_prefix(scheme: str) -> Tokenizer:
    """MODEL's merges with U+2581 for the space, and a word start put before a text by `scheme`."""
    record = json.loads(MODEL.to_json())
    model = record["model"]
    model["vocab"] = {piece.replace(" ", SPACE): i for piece, i in model["vocab"].items()}
    model["merges"] = [[part.replace(" ", SPACE) for part in merge] for merge in model["merges"]]
    backend = Backend.from_str(json.dumps(record))
    if scheme == "always":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        backend.pre_tokenizer = None
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
    return Tokenizer(backend)


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CODE, "the cat sat on the mat"], trainer)
    return Tokenizer(backend)


KINDS = {
    "trained": MODEL,
    "word start always": with_prefix("always"),
    "word start unless a space": with_prefix("first"),
    "byte level": byte_level(),
    "byte level with a space": byte_level(add_prefix_space=True),
}


every_kind = pytest.mark.parametrize("kind", KINDS)
