"""Text <-> token ids: a thin wrapper over `tokenizers`, and the training of a byte-fallback BPE.

Id space of a model: the tokenizer's own pieces (BOS and EOS among them), then MASK, then PAD, then
rows of the embedding that nothing uses. MASK and PAD lie above the largest id the tokenizer knows,
not above a declared vocabulary size: added tokens may stand there (spec data.md 4).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError

BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|endoftext|>")

_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_FIXED_PIECES = (BOS_NAMES[0], EOS_NAMES[0], *_BYTE_PIECES)
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


class Tokenizer:
    """Encodes without special tokens; what a text says literally is always ordinary text."""

    def __init__(self, backend: Backend) -> None:
        """Takes `backend` over; raises UserError where it has no BOS or EOS."""
        pieces = backend.get_vocab(with_added_tokens=True)
        self.bos_id = _special_id(pieces, BOS_NAMES, "beginning-of-text")
        self.eos_id = _special_id(pieces, EOS_NAMES, "end-of-text")
        ends = [name for name, i in pieces.items() if i in (self.bos_id, self.eos_id)]
        backend.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name in ends]
        )
        # A file may ask for padding or truncation to some model's length; both would change text.
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self._backend = backend
        self.num_pieces = max(pieces.values()) + 1

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Reads the text of a tokenizer.json; raises UserError where it is none."""
        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"not a tokenizer.json of the tokenizers library: {error}") from None
        return cls(backend)

    def to_json(self) -> str:
        return self._backend.to_str()

    @property
    def mask_id(self) -> int:
        return self.num_pieces

    @property
    def pad_id(self) -> int:
        return self.num_pieces + 1

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, in parallel where the library runs threads."""
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; specials, MASK, PAD and unused ids are skipped.

        A run of byte pieces that is not UTF-8 as a whole becomes one U+FFFD per byte.
        """
        known = np.asarray(ids, dtype=np.int64)
        known = known[(known >= 0) & (known < self.num_pieces)]
        return self._backend.decode(known.tolist(), skip_special_tokens=True)

    def emittable(self, vocab_size: int) -> np.ndarray:
        """bool (vocab_size,): what decoding may write. Pieces and EOS, no other special or row."""
        self.require_fits(vocab_size)
        allowed = np.zeros(vocab_size, dtype=bool)
        allowed[list(self._backend.get_vocab(with_added_tokens=True).values())] = True
        added = self._backend.get_added_tokens_decoder()
        allowed[[i for i, token in added.items() if token.special]] = False
        allowed[self.bos_id] = False
        allowed[self.eos_id] = True
        return allowed

    def require_fits(self, vocab_size: int) -> None:
        """Raises UserError where the model has no rows for every piece, MASK and PAD."""
        needed = self.num_pieces + 2
        if vocab_size < needed:
            raise UserError(
                f"model.vocab_size {vocab_size} is too small: the tokenizer has {self.num_pieces} "
                f"pieces, and with MASK and PAD it needs at least {needed}"
            )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer.json at `path`; raises UserError."""
    try:
        return Tokenizer.from_json(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def train_tokenizer(texts: Iterable[str], num_pieces: int) -> Tokenizer:
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
    return Tokenizer(_with_bytes(backend))


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


def _special_id(pieces: dict[str, int], names: Sequence[str], what: str) -> int:
    for name in names:
        if name in pieces:
            return pieces[name]
    raise UserError(
        f"the tokenizer has no {what} token ({', '.join(names)}): add one, "
        'or set data.tokenizer to "train"'
    )
