"""Text <-> token ids: a wrapper over the `tokenizers` library, and where a tokenizer comes from.

Id space of a model: the tokenizer's own pieces (BOS and EOS among them), then phrase tokens, then
MASK, then PAD, then rows of the embedding that nothing uses. All of these lie above the largest id
the tokenizer knows, not above a declared vocabulary size: added tokens may stand there (spec
data.md 4).

A document is BOS, its text, EOS. The text is encoded with whatever space the tokenizer puts before
a text, as the published checkpoints of such tokenizers were trained: "The" at a text's start is the
piece that it is after a space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError
from diffurefill.data.tokens import pieces, sentencepiece
from diffurefill.data.tokens.bpe import train_bpe
from diffurefill.data.tokens.fast_encoder import EncodeBatch, gigatoken_encoder, require_same_ids
from diffurefill.data.tokens.phrases import PhraseTable
from diffurefill.data.tokens.tokenizer_files import tokenizer_file

BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "<|endoftext|>")
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|endoftext|>")

_PHRASES_KEY = "phrases"
"""Ours, in the JSON of a tokenizer with phrase tokens; the library never sees it."""


class Tokenizer:
    """Encodes without special tokens; what a text says literally is always ordinary text."""

    def __init__(
        self,
        backend: Backend,
        phrases: Sequence[str] = (),
        encode_batch: EncodeBatch | None = None,
        record: pieces.Record | None = None,
    ) -> None:
        """Takes `backend` over; raises UserError where it has no BOS or EOS.

        One with a single token for both gets a BOS of its own, as an added token. `encode_batch` is
        a faster way to the ids of `backend`; `record` is its JSON, if it is at hand.
        """
        vocab = backend.get_vocab(with_added_tokens=True)
        self.eos_id = _special_id(vocab, EOS_NAMES, "end-of-text")
        if _special_id(vocab, BOS_NAMES, "beginning-of-text") == self.eos_id:
            # One token for both would not do: EOS is learnt and written, BOS only ever given.
            backend.add_special_tokens([BOS_NAMES[0]])
            vocab = backend.get_vocab(with_added_tokens=True)
        self.bos_id = _special_id(vocab, BOS_NAMES, "beginning-of-text")
        ends = [name for name, i in vocab.items() if i in (self.bos_id, self.eos_id)]
        self._backend = _plain(backend, ends)
        self._encode_own = encode_batch or self._encode_with_backend
        self._num_own = max(vocab.values()) + 1
        # Taken from the record now: to parse it once more takes memory, in whichever thread asks.
        record = self._record() if record is None else record
        self._own_lengths = pieces.byte_lengths(record, self._num_own, self._special_ids())
        self._word_start = pieces.word_start(record)
        self.phrases = tuple(phrases)
        self._table = PhraseTable(self._phrase_ids(), self._num_own)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Reads the text of a tokenizer.json; raises UserError where it is none, and where the
        library gives an added token another id than the file does."""
        try:
            record = json.loads(text)
            phrases = _taken_phrases(record)
            backend = Backend.from_str(json.dumps(record) if phrases else text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"not a tokenizer.json of the tokenizers library: {error}") from None
        _require_ids_as_stated(record, backend)
        # Older writers leave fields out, or call them otherwise; the library knows them all.
        record = json.loads(backend.to_str())
        if pieces.keep_specials_out(record, {*BOS_NAMES, *EOS_NAMES}):
            backend = Backend.from_str(json.dumps(record))
        return cls(backend, phrases, record=record)

    def to_json(self) -> str:
        text = self._backend.to_str()
        if not self.phrases:
            return text
        return json.dumps(json.loads(text) | {_PHRASES_KEY: self.phrases}, ensure_ascii=False)

    @property
    def num_pieces(self) -> int:
        """Ids of the tokenizer, its added tokens and the phrases: those below MASK."""
        return self._num_own + len(self._table)

    @property
    def mask_id(self) -> int:
        return self.num_pieces

    @property
    def pad_id(self) -> int:
        return self.num_pieces + 1

    @cached_property
    def vocabulary_digest(self) -> str:
        """First 12 hex digits of a sha256 over every piece and phrase with its id: where it is the
        same, the same ids stand for the same text."""
        pieces = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        record = json.dumps([pieces, self.phrases, self.bos_id, self.eos_id])
        return hashlib.sha256(record.encode()).hexdigest()[:12]

    # --- text to ids and back --------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a text from its start on, without BOS and EOS."""
        return self._table.replace(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, in parallel where the library runs threads."""
        return [self._table.replace(ids) for ids in self._encode_own(list(texts))]

    def encode_inner(self, text: str) -> list[int]:
        """The ids of a text that stands inside a document: no space is put before it."""
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return self._table.replace(ids)

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """A document of `ids`: BOS and EOS around them."""
        return [self.bos_id, *ids, self.eos_id]

    def document(self, text: str) -> list[int]:
        """What training, probes and scoring make of a text."""
        return self.wrap(self.encode(text))

    def prompt(self, text: str) -> list[int]:
        """The beginning of `document(text)`, to be continued."""
        return [self.bos_id, *self.encode(text)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; specials, MASK, PAD and unused ids are skipped.

        Bytes that are no UTF-8 become U+FFFD.
        """
        return self._decode(self._backend, ids)

    def decode_inner(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` from inside a document: a space before the first word is kept."""
        return self._decode(self._inner, ids)

    def _decode(self, backend: Backend, ids: Sequence[int] | np.ndarray) -> str:
        own = self._own_ids(ids)
        text = backend.decode(own, skip_special_tokens=True)
        if "\ufffd" not in text or not self._bytes_of:
            return text
        # The library gives up a whole run of byte pieces, and with it a line break that is sound.
        parts: list[bytes] = []
        for is_byte, run in groupby(own, key=self._bytes_of.__contains__):
            if is_byte:
                parts.append(bytes(self._bytes_of[i] for i in run))
            else:
                chosen = self._inner if parts else backend
                parts.append(chosen.decode(list(run), skip_special_tokens=True).encode())
        return b"".join(parts).decode("utf-8", "replace")

    @cached_property
    def _bytes_of(self) -> dict[int, int]:
        """The byte pieces' ids and what they stand for; none in a byte-level BPE."""
        vocab = self._backend.get_vocab(with_added_tokens=False)
        named = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {vocab[name]: byte for name, byte in named.items() if name in vocab}

    # --- bytes -----------------------------------------------------------------------------------

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """int64 (num_pieces,): UTF-8 bytes of text each id stands for; specials stand for none."""
        own = self._own_lengths
        sums = [own[list(sequence)].sum() for sequence in self._table.sequences]
        return np.concatenate([own, np.array(sums, dtype=np.int64)])

    def byte_ends(self, ids: Sequence[int] | np.ndarray, text: str) -> np.ndarray | None:
        """int64 (n,): where in the UTF-8 bytes of `text` each of `ids == encode(text)` ends.

        The space that the tokenizer puts before a text is not counted. None where the tokenizer
        changed the text, so that its pieces cannot be laid over it.
        """
        ends = np.cumsum(self.byte_lengths[np.asarray(ids, dtype=np.int64)])
        ends = np.maximum(ends - self._bytes_put_before(text), 0)
        last = ends[-1] if len(ends) else 0
        return ends if last == len(text.encode("utf-8", "surrogatepass")) else None

    # --- a model's vocabulary --------------------------------------------------------------------

    def emittable(self, vocab_size: int) -> np.ndarray:
        """bool (vocab_size,): what decoding may write. Pieces, phrases and EOS, no other special
        and no row without a piece."""
        self.require_fits(vocab_size)
        allowed = np.zeros(vocab_size, dtype=bool)
        allowed[list(self._backend.get_vocab(with_added_tokens=True).values())] = True
        allowed[self._num_own : self.num_pieces] = True
        allowed[self._special_ids()] = False
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

    # --- variants --------------------------------------------------------------------------------

    def with_phrases(self, phrases: Sequence[str]) -> Tokenizer:
        """This tokenizer with exactly these phrases as tokens, as they read after a space.

        Phrases that are one token already, or the same tokens as an earlier one, get no id.
        """
        return Tokenizer(self._backend, phrases, self._encode_own)

    def with_encoder(
        self, name: Literal["tokenizers", "gigatoken"], sample_texts: Sequence[str]
    ) -> Tokenizer:
        """This tokenizer with another encoder for batches, which first encodes `sample_texts`.

        Raises UserError where that gives other ids, where the encoder is not installed, and where
        it cannot follow this tokenizer.
        """
        if name == "tokenizers":
            return Tokenizer(self._backend, self.phrases)
        fast = gigatoken_encoder(self._record())
        require_same_ids(self._encode_with_backend, fast, sample_texts)
        return Tokenizer(self._backend, self.phrases, fast)

    # --- inside ----------------------------------------------------------------------------------

    def _encode_with_backend(self, texts: list[str]) -> list[list[int]]:
        batch = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def _record(self) -> pieces.Record:
        """Parsed anew each time: it is large, and seldom needed."""
        return json.loads(self._backend.to_str())

    def _own_ids(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The ids that the backend knows, phrases written out."""
        row = np.asarray(ids, dtype=np.int64)
        row = row[(row >= 0) & (row < self.num_pieces)]
        return self._table.expand(row.tolist())

    def _special_ids(self) -> list[int]:
        added = self._backend.get_added_tokens_decoder()
        return [i for i, token in added.items() if token.special]

    def _phrase_ids(self) -> list[tuple[int, ...]]:
        inner = self._inner if self.phrases else self._backend
        encoded = [inner.encode(f" {phrase}", add_special_tokens=False) for phrase in self.phrases]
        return list(dict.fromkeys(tuple(e.ids) for e in encoded if len(e.ids) >= 2))

    @cached_property
    def _inner(self) -> Backend:
        """The backend without a word start; itself where it has none."""
        if self._word_start == "never":
            return self._backend
        record = pieces.without_word_start(self._record())
        inner = Backend.from_str(json.dumps(record))
        inner.encode_special_tokens = True
        return inner

    def _bytes_put_before(self, text: str) -> int:
        if not text or self._word_start == "never":
            return 0
        return int(self._word_start == "always" or not text.startswith(" "))


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that `spec` names; raises UserError.

    `spec` is a tokenizer.json, a SentencePiece tokenizer.model, a folder with either (and then the
    JSON counts), or `hf://user/repo` or `hf://user/repo@revision` on the hub.
    """
    try:
        path = tokenizer_file(spec)
        if path.suffix == ".model":
            return Tokenizer.from_json(sentencepiece.load_backend(path).to_str())
        return Tokenizer.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {spec}: {error}") from None
    except UserError as error:
        raise UserError(f"{spec}: {error}") from None


def train_tokenizer(texts: Iterable[str], num_pieces: int) -> Tokenizer:
    """A byte-fallback BPE of at most `num_pieces` pieces trained on `texts`; see `train_bpe`."""
    return Tokenizer(train_bpe(texts, num_pieces))


def _taken_phrases(record: Any) -> list[str]:
    """Our phrases, out of a parsed tokenizer.json; raises UserError where it cannot be one."""
    if not isinstance(record, dict):
        raise UserError("it is no JSON object; name a tokenizer.json")
    phrases = record.pop(_PHRASES_KEY, [])
    if not isinstance(phrases, list) or not all(isinstance(one, str) for one in phrases):
        raise UserError(f"its {_PHRASES_KEY} are no list of texts; make it again")
    return phrases


def _require_ids_as_stated(record: pieces.Record, backend: Backend) -> None:
    """The library numbers added tokens on from the vocabulary, whatever ids they state: a model
    trained with the stated ones would read other tokens."""
    for token in record.get("added_tokens") or ():
        given = backend.token_to_id(token["content"])
        if given != token["id"]:
            raise UserError(
                f"the added token {token['content']!r} has id {token['id']}, but the tokenizers "
                f"library reads it as {given}: added ids must go on from the vocabulary's without "
                "a hole. Name the ids between them too, as <unused0>, <unused1> ..."
            )


def _plain(backend: Backend, ends: Sequence[str]) -> Backend:
    """`backend`, with `ends` as special tokens, encoding texts as they are."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ends])
    # A file may ask for padding or truncation to some model's length; both would change text.
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


def _special_id(pieces_of: dict[str, int], names: Sequence[str], what: str) -> int:
    for name in names:
        if name in pieces_of:
            return pieces_of[name]
    raise UserError(
        f"the tokenizer has no {what} token ({', '.join(names)}): add one, "
        'or set data.tokenizer to "train"'
    )
