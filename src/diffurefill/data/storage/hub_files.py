"""Data sets on the hub: hf://datasets/owner/name[@revision][/file, folder or pattern]

A revision with a slash is written quoted (`@refs%2Fpr%2F1`); `@refs/convert/parquet`,
`@refs/pr/1` and `@~parquet` are understood too. HF_ENDPOINT names the hub; the login is HF_TOKEN or
the saved one.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import httpx2
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers

from diffurefill.config import UserError
from diffurefill.data.storage.http import HttpRanges, asked
from diffurefill.data.storage.listing import File, find_files
from diffurefill.data.storage.patience import LISTING, Passing, retried

SHAPE = "hf://datasets/owner/name[@revision][/folder or file]"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?"
    r"(?:/(?P<path>.*))?"
)
_CONVERTED = {"~parquet": "refs/convert/parquet"}


class Address(NamedTuple):
    """`revision`: a branch, tag or commit; None is the main branch. `path`: "" is everything."""

    repo: str
    revision: str | None
    path: str

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://datasets/{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


def parse(address: str) -> Address:
    """Raises UserError."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise UserError(f"{address}: write a data set of the hub as {SHAPE}")
    revision = found["revision"] and unquote(found["revision"])
    return Address(
        found["repo"], _CONVERTED.get(revision, revision), (found["path"] or "").strip("/")
    )


def pinned_hub(address: str) -> str:
    """`address` with its revision replaced by the commit that it points to now."""
    parsed = parse(address)
    return address if _is_pinned(parsed) else str(_pinned(parsed))


def list_hub(address: str) -> list[File]:
    """See files.list_files. The files' addresses are pinned, whatever `address` is."""
    parsed = parse(address)
    parsed = parsed if _is_pinned(parsed) else _pinned(parsed)
    found = find_files(address, parsed.path, Tree(parsed))
    return [File(str(parsed._replace(path=path)), name, size) for path, name, size in found]


def hub_ranges(uri: str) -> HttpRanges:
    address = parse(uri)
    _require_online(address)
    url = hf_hub_url(
        address.repo,
        address.path,
        repo_type="dataset",
        revision=address.revision,
        endpoint=_endpoint(),
    )
    # Asked for anew with each range, since the addresses it redirects to are good for an hour.
    return HttpRanges(url, uri, build_hf_headers, lambda response: _refusal(response, address))


class Tree:
    """See listing.Listing: the files of a data set at one commit."""

    def __init__(self, address: Address) -> None:
        self._address = address
        commit = quote(address.revision or "main", safe="")
        self._paths_info = f"/api/datasets/{address.repo}/paths-info/{commit}"
        self._tree = f"/api/datasets/{address.repo}/tree/{commit}"

    def size_of(self, path: str) -> int | None:
        form = {"paths": [path], "expand": "false"}
        found, _ = _asked_hub("POST", self._paths_info, self._address, data=form)
        return next((entry["size"] for entry in found if entry["type"] == "file"), None)

    def below(self, folder: str) -> dict[str, int]:
        where = f"/{quote(folder, safe='')}" if folder else ""
        url: str | None = f"{self._tree}{where}?recursive=true&expand=false"
        sizes: dict[str, int] = {}
        while url is not None:
            entries, url = _asked_hub("GET", url, self._address, missing=[])
            sizes |= {e["path"]: e["size"] for e in entries if e["type"] == "file"}
        if not folder:
            sizes.pop("README.md", None)  # describes the data, and is none
        return sizes


def _is_pinned(address: Address) -> bool:
    return _COMMIT.fullmatch(address.revision or "") is not None


def _pinned(address: Address) -> Address:
    revision = f"/revision/{quote(address.revision, safe='')}" if address.revision else ""
    info, _ = _asked_hub("GET", f"/api/datasets/{address.repo}{revision}", address)
    return address._replace(revision=info["sha"])


def _asked_hub(
    method: str, path: str, address: Address, missing: Any = None, **options: Any
) -> tuple[Any, str | None]:
    """(the answer's JSON, path of its next page). `missing`: what stands for a folder not there.

    Not through HfApi: it may wait for ever, and its own retries neither end when ours do nor say
    what they wait for.
    """
    _require_online(address)

    def attempt() -> tuple[Any, str | None]:
        url, shown = _endpoint() + path, str(address)
        with asked(method, url, shown, build_hf_headers(), **options) as response:
            if response.status_code != 200:
                if missing is not None and _error_code(response) == "EntryNotFound":
                    return missing, None
                raise _refusal(response, address)
            try:
                answer = json.loads(response.read())
            except ValueError:  # what a captive portal or a proxy says
                raise Passing("the answer is not the hub's") from None
            following = response.links.get("next", {}).get("url")
            # Its path only: the token goes to no other host that an answer names.
            return answer, following and re.sub(r"^https?://[^/]+", "", following)

    return retried(str(address), attempt, LISTING)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _require_online(address: Address) -> None:
    if constants.is_offline_mode():
        raise UserError(f"{address} cannot be reached: HF_HUB_OFFLINE is set; unset it")


def _error_code(response: httpx2.Response) -> str:
    return response.headers.get("X-Error-Code", "")


def _refusal(response: httpx2.Response, address: Address) -> UserError:
    """What an error answer of the hub means. Its own words are left out: they may echo a token."""
    status, code, repo = response.status_code, _error_code(response), address.repo
    if code == "GatedRepo":
        return UserError(
            f"{address}: its owner asks for consent: accept the conditions at "
            f"{_endpoint()}/datasets/{repo}, then log in with `hf auth login` or set HF_TOKEN"
        )
    if code == "RevisionNotFound":
        return UserError(f"the data set {repo} has no branch, tag or commit {address.revision!r}")
    if code == "EntryNotFound":
        return UserError(f"{address}: no such file or folder in the data set")
    if status in (401, 404):
        return UserError(
            f"no data set {repo} on the hub, or your account may not read it: check the name, and "
            "log in with `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return UserError(
            f"{address}: the hub refused the login (403): log in with `hf auth login` or set "
            "HF_TOKEN to a token that may read it"
        )
    return UserError(f"{address}: the hub answered {status}: check the address")
