"""A tokenizer as transformers reads it: MASK and PAD among its tokens, BOS put before a text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from diffurefill.config import UserError
from diffurefill.data.tokens.tokenizer import Tokenizer

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")


def tokenizer_files(tokenizer: Tokenizer, max_tokens: int) -> dict[str, bytes]:
    """{file name: content}: tokenizer.json and tokenizer_config.json.

    Raises UserError for phrase tokens, which no tokenizer.json of the library can hold.
    """
    if tokenizer.phrases:
        raise UserError(
            "this model has phrase tokens, which transformers' tokenizers cannot read: export it "
            "with --format pt"
        )
    backend = Backend.from_str(tokenizer.to_json())
    vocab = backend.get_vocab(with_added_tokens=True)
    mask, pad = (_free(names, vocab) for names in (MASK_NAMES, PAD_NAMES))
    backend = _with_tokens(backend, {mask: tokenizer.mask_id, pad: tokenizer.pad_id})
    bos = backend.id_to_token(tokenizer.bos_id)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": backend.id_to_token(tokenizer.eos_id),
        "pad_token": pad,
        "mask_token": mask,
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode(),
    }


def _free(names: tuple[str, ...], vocab: dict[str, int]) -> str:
    for name in names:
        if name not in vocab:
            return name
    raise UserError(f"the tokenizer has pieces {', '.join(names)}: no name is left for ours")


def _with_tokens(backend: Backend, wanted: dict[str, int]) -> Backend:
    """`backend` with special tokens at exactly these ids, which lie above all it has."""
    # The library numbers new tokens from the size of the vocabulary on. Where that has holes, the
    # ids it would give are taken: then they become pieces of the model, which no text can reach.
    tried = Backend.from_str(backend.to_str())
    tried.add_special_tokens([_special(name) for name in wanted])
    if all(tried.token_to_id(name) == i for name, i in wanted.items()):
        return tried
    record: dict[str, Any] = json.loads(backend.to_str())
    if not isinstance(record["model"]["vocab"], dict):
        raise UserError("the ids of this tokenizer have holes, which only a BPE can keep")
    record["model"]["vocab"] |= wanted
    backend = Backend.from_str(json.dumps(record))
    backend.add_special_tokens([_special(name) for name in wanted])
    if any(backend.token_to_id(name) != i for name, i in wanted.items()):
        raise UserError(f"the tokenizer cannot hold {wanted}: export it with --format pt")
    return backend


def _special(name: str) -> AddedToken:
    # A piece brings the space before it: "is [MASK]." must be asked for as "is[MASK]." is.
    return AddedToken(name, special=True, normalized=False, lstrip=name in MASK_NAMES)
