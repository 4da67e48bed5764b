"""Where a tokenizer's file lies: a path, a folder, or a repository of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from diffurefill.config import UserError

HUB = "hf://"
_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(.+))?")
_NAMES = ("tokenizer.json", "tokenizer.model")
_BESIDE_MODEL = ("added_tokens.json", "tokenizer_config.json")


def tokenizer_file(spec: str | Path) -> Path:
    """The tokenizer.json or tokenizer.model of `spec`, fetched from the hub if it lies there.

    Raises UserError where there is none, or it cannot be fetched.
    """
    if str(spec).startswith(HUB):
        return _file_on_hub(str(spec))
    path = Path(spec)
    if not path.is_dir():
        return path
    for name in _NAMES:
        if (path / name).exists():
            return path / name
    raise UserError(f"the folder holds neither {' nor '.join(_NAMES)}")


def _file_on_hub(address: str) -> Path:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError("write the address as hf://user/repo or hf://user/repo@revision")
    repo, revision = match.groups()
    for name in _NAMES:
        path = _fetch(repo, revision, name)
        if path is not None:
            break
    else:
        raise UserError(f"the repository holds neither {' nor '.join(_NAMES)}")
    if path.suffix == ".model":
        for name in _BESIDE_MODEL:  # they land in the same folder, where the reader looks for them
            _fetch(repo, revision, name)
    return path


def _fetch(repo: str, revision: str | None, name: str) -> Path | None:
    """The local copy of one file; None where the repository has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except RemoteEntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot fetch {name} from the hub ({reason}): check the name, the revision and your "
            "token, or download it and name the file"
        ) from None
