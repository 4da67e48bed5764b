"""Training of a byte-fallback BPE on a run's own text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError

BOS, EOS = "<s>", "</s>"

_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_FIXED_PIECES = (BOS, EOS, *_BYTE_PIECES)
_MIN_PIECES = 300
_MAX_PIECE_CHARS = 24

# Line breaks with the indentation after them, words and numbers with the space before them, runs of
# punctuation, other blanks. Letters and punctuation never share a piece, so no text can merge into
# "<s>" or "<0x0A>". Every branch is linear in the length of a run of blanks.
_SPLIT = (
    r"\n+[ \t]*"
    r"| ?[\p{L}\p{M}]+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|[ \t]+(?=[ ]\S)"
    r"|[^\S\n]+"
)


def train_bpe(texts: Iterable[str], num_pieces: int) -> Backend:
    """A BPE of at most `num_pieces` pieces: BOS, EOS, 256 bytes, frequent characters, merges.

    Characters outside the alphabet are written as their UTF-8 bytes, so no text is unknown. The
    same texts in the same order give the same tokenizer. Raises UserError on empty text.
    """
    if num_pieces < _MIN_PIECES:
        raise UserError(
            f"data.tokenizer_pieces {num_pieces} is too small: BOS, EOS and 256 bytes are among "
            f"them; use at least {_MIN_PIECES}"
        )
    texts = [text for text in texts if text]
    if not texts:
        raise UserError("no text to train a tokenizer on: add text to data.sources")
    alphabet = _alphabet(texts, num_pieces // 8)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces - len(_FIXED_PIECES),
        min_frequency=2,
        # Passed in full: where characters tie, the library's own choice differs between runs.
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        max_token_length=_MAX_PIECE_CHARS,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_bytes(backend)


def _alphabet(texts: Sequence[str], max_chars: int) -> list[str]:
    """The most frequent characters, ties by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return sorted(counts, key=lambda char: (-counts[char], char))[:max_chars]


def _with_bytes(trained: Backend) -> Backend:
    """The trained merges with BOS, EOS and the byte pieces put before them.

    They join the vocabulary after training and are no added tokens: an added token is looked for
    in the text, and a literal "<0x0A>" would then be read as a line break.
    """
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    assert not set(learned) & set(_FIXED_PIECES)
    vocab = {piece: i for i, piece in enumerate((*_FIXED_PIECES, *learned))}
    merges = [(left, right) for left, right in model["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = trained.pre_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend
