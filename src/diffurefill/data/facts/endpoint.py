"""An OpenAI-compatible chat-completions endpoint, asked patiently.

The HTTP client is httpx2, which huggingface_hub brings along: it has an async client, so bounded
concurrency is a number of tasks, not of threads, and a request that hangs can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2

from diffurefill.config import UserError
from diffurefill.data.facts.leads import well_formed
from diffurefill.runtime import philox

_TRANSIENT = frozenset((408, 409, 425, 429))
_NO_MODEL = ("model_not_found", "does not exist", "not found", "no such model", "unknown model")
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_ASKED_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Endpoint:
    """`url` ends before /chat/completions, usually in /v1. The key is never printed or stored."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 180.0
    """For one try, from sending to the last byte."""
    tries: int = 6

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(
                f"--endpoint {self.url!r} is no web address: it looks like http://127.0.0.1:8000/v1"
            )


class Answer(NamedTuple):
    text: str
    finish_reason: str


class GaveUp(Exception):
    """This one question got no answer; others may."""


def key_from_environment(variable: str | None) -> str | None:
    """The API key in the environment variable of this name; None where no name is given."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the environment variable {variable} holds no key: set it, then try again")
    return key


class ChatClient:
    """Asks one endpoint; use it as an async context. `num_retries` and `trouble` say how it goes.

    `sleep` waits between tries; `num_connections` limits what is open at once; `report` hears of
    the first trouble, which else nobody would see for a minute.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        num_connections: int,
        report: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.endpoint = endpoint
        self.num_retries = 0
        self.trouble = ""
        self._report = report
        self._sleep = sleep
        key = endpoint.api_key
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(endpoint.timeout_seconds),
            limits=httpx2.Limits(max_connections=num_connections),
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._client.aclose()

    async def ask(
        self, messages: Sequence[dict[str, Any]], max_tokens: int, temperature: float, seed: int
    ) -> Answer:
        """The model's answer. Tries again what may pass: a lost connection, a hang, 408, 429, 5xx.

        Raises GaveUp where this question got none, UserError where no question would get one.
        """
        body = {
            "model": self.endpoint.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        for number in range(self.endpoint.tries):
            answer, asked_wait = await self._try(body)
            if answer is not None:
                return answer
            if number + 1 < self.endpoint.tries:
                if self.num_retries == 0:
                    self._report(f"the endpoint gives no answer ({self.trouble}); trying again")
                self.num_retries += 1
                await self._sleep(max(_wait_seconds(number, seed), asked_wait))
        raise GaveUp(self.trouble)

    async def _try(self, body: dict[str, Any]) -> tuple[Answer | None, float]:
        """The answer, or None with the seconds that the server asks to wait."""
        try:
            # The client's own timeouts count from byte to byte: a server could trickle for ever.
            async with asyncio.timeout(self.endpoint.timeout_seconds):
                response = await self._client.post(
                    f"{self.endpoint.url.rstrip('/')}/chat/completions", json=body
                )
        except (TimeoutError, httpx2.TimeoutException):
            self.trouble = f"no answer within {self.endpoint.timeout_seconds:g} s"
            return None, 0.0
        except httpx2.TransportError as error:
            self.trouble = f"{type(error).__name__}: {error}"
            return None, 0.0
        if response.status_code == 200:
            answer = _parsed(response)
            if answer is None:
                self.trouble = "an answer that is no chat completion; does --endpoint end in /v1?"
            return answer, 0.0
        self.trouble = f"HTTP {response.status_code}: {self._said(response)}"
        if response.status_code in _TRANSIENT or response.status_code >= 500:
            self._stop_without_quota(response)
            return None, _asked_wait_seconds(response)
        self._stop_where_none_will_pass(response)
        raise GaveUp(self.trouble)

    def _said(self, response: httpx2.Response) -> str:
        """What the server says, on one line, short, without the key."""
        said = _error_message(response)
        if self.endpoint.api_key:
            said = said.replace(self.endpoint.api_key, "[key]")
        return " ".join(said.split())[:300]

    def _stop_without_quota(self, response: httpx2.Response) -> None:
        if response.status_code == 429 and "insufficient_quota" in response.text:
            raise UserError(f"the account has no quota left: {self._said(response)}")

    def _stop_where_none_will_pass(self, response: httpx2.Response) -> None:
        """UserError for a wrong key, address or model."""
        said, status = self._said(response), response.status_code
        if status in (401, 403):
            raise UserError(
                f"the endpoint refuses the key (HTTP {status}: {said}); name the environment "
                "variable that holds it with --key-variable"
            )
        names_model = "model" in said.lower() or "model_not_found" in response.text
        if names_model and any(sign in response.text.lower() for sign in _NO_MODEL):
            raise UserError(
                f"the endpoint has no model {self.endpoint.model!r} (HTTP {status}: {said}); "
                "give one of its models with --model"
            )
        if status in (404, 405):
            raise UserError(
                f"nothing answers at {self.endpoint.url}/chat/completions (HTTP {status}: {said}); "
                "--endpoint usually ends in /v1"
            )


def _parsed(response: httpx2.Response) -> Answer | None:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        choice = response.json()["choices"][0]
        text = choice["message"].get("content") or ""
        if isinstance(text, str):
            return Answer(well_formed(text), str(choice.get("finish_reason")))
    return None


def _error_message(response: httpx2.Response) -> str:
    """OpenAI's {"error": {"message"}}, others' {"message"} or {"detail"}, or the body."""
    with contextlib.suppress(ValueError):
        found = response.json()
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
        return found if isinstance(found, str) else json.dumps(found)
    return response.text


def _wait_seconds(number: int, seed: int) -> float:
    """Doubling, with jitter: many clients must not come back at once."""
    wait = min(_FIRST_WAIT_SECONDS * 2.0**number, _LONGEST_WAIT_SECONDS)
    return wait * (0.5 + philox("retry", seed, number).random())


def _asked_wait_seconds(response: httpx2.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", "0"))
    except ValueError:  # an HTTP date: our own waits grow anyway
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_ASKED_WAIT_SECONDS)
