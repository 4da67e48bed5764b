"""gigatoken as the encoder: the same ids as the `tokenizers` library in a fraction of the time.

Before it is used, it must encode a sample of the run's text to the very ids of the library, which
stays the reference: not every fast encoder is exact, and a run must not depend on who encodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from diffurefill.config import UserError

EncodeBatch = Callable[[list[str]], list[list[int]]]
"""Texts -> their ids, without special tokens."""

CHECKED_TEXTS = 1_000
_BATCH = 64
_OTHERWISE = 'or set data.encoder to "tokenizers"'


def gigatoken_encoder(record: dict[str, Any]) -> EncodeBatch:
    """`record` is a parsed tokenizer.json. Raises UserError where gigatoken is missing or cannot
    follow this tokenizer."""
    try:
        import gigatoken  # pyrefly: ignore[missing-import]
    except ImportError:
        raise UserError(
            "data.encoder = gigatoken needs the package gigatoken: install diffurefill[fast], "
            f"{_OTHERWISE}"
        ) from None
    # It would look for special tokens in the text; to us, what a text says is ordinary text.
    ordinary = [token for token in record["added_tokens"] if not token["special"]]
    plain = record | {"added_tokens": ordinary, "post_processor": None}
    try:
        return gigatoken.Tokenizer.from_json(json.dumps(plain)).encode_batch_list
    except Exception as error:  # the package raises several kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"gigatoken cannot follow this tokenizer ({reason}): use another, {_OTHERWISE}"
        ) from None


def require_same_ids(reference: EncodeBatch, fast: EncodeBatch, texts: Sequence[str]) -> None:
    """Raises UserError unless both encode the first `CHECKED_TEXTS` of `texts` to the same ids."""
    if not texts:
        raise UserError(f"no text to check the fast encoder on: add data, {_OTHERWISE}")
    for start in range(0, min(len(texts), CHECKED_TEXTS), _BATCH):
        part = list(texts[start : start + _BATCH])
        for offset, (own, other) in enumerate(zip(reference(part), fast(part), strict=True)):
            if own != other:
                raise UserError(
                    f"the fast encoder gives text {start + offset} other tokens than the tokenizer "
                    f'does: set data.encoder to "tokenizers"'
                )
