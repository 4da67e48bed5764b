"""Ask an endpoint about every lead that has no answer yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from diffurefill.config import UserError
from diffurefill.data.facts.answers import Answers
from diffurefill.data.facts.endpoint import ChatClient, Endpoint, GaveUp
from diffurefill.data.facts.leads import Lead, subject_name
from diffurefill.data.facts.prompts import (
    STYLES,
    Style,
    answer_key,
    messages,
    prompt_version,
    request_seed,
)

MAX_FAILURES = 20
"""So many questions in a row without an answer mean that the endpoint is gone."""
_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Task:
    """What is asked: the same task finds its earlier answers again."""

    style: Style
    seed: int = 0
    num_sentences: int = 8
    left_out: frozenset[str] = frozenset()
    """Subjects (see `subject_name`) whose leads are not asked about."""

    @property
    def version(self) -> str:
        return prompt_version(self.style, self.num_sentences)

    def questions(self, leads: Iterable[Lead]) -> Iterator[tuple[str, Lead]]:
        """(key, lead) of each lead to ask about, in order; a repeated id is one question."""
        version, seen = self.version, set()
        for lead in leads:
            key = answer_key(lead, self.style, self.seed, version)
            if key not in seen and subject_name(lead.title) not in self.left_out:
                seen.add(key)
                yield key, lead


def task(style: str, seed: int, num_sentences: int, left_out: frozenset[str]) -> Task:
    return Task(STYLES[style], seed, num_sentences, left_out)


@dataclass
class Progress:
    """Counts of questions."""

    total: int
    stored: int
    """Answered by an earlier process."""
    answered: int = 0
    failed: int = 0
    failed_in_a_row: int = 0

    def line(self, client: ChatClient, seconds: float) -> str:
        rate = self.answered / seconds if seconds else 0.0
        line = f"{self.stored + self.answered:,} of {self.total:,} answers, {rate:.1f} a second"
        if self.failed:
            line += f", {self.failed:,} without"
        if client.num_retries:
            line += f", {client.num_retries:,} tries again (last: {client.trouble})"
        return line


def ask_all(
    leads: Iterable[Lead],
    answers: Answers,
    task: Task,
    endpoint: Endpoint,
    concurrency: int,
    report: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Progress:
    """Ask about every lead without an answer, `concurrency` at a time; each answer is stored as it
    comes. `leads` is iterated twice. Raises UserError where going on is of no use."""
    keys = [key for key, _ in task.questions(leads)]
    if not keys:
        raise UserError("there is no lead to ask about: the files are empty, or all is held out")
    progress = Progress(total=len(keys), stored=sum(key in answers for key in keys))
    _check_model(keys, answers, endpoint.model)
    todo = ((key, lead) for key, lead in task.questions(leads) if key not in answers)
    report(f"{progress.total:,} leads, {progress.stored:,} of them answered already")
    if progress.stored < progress.total:
        asyncio.run(_ask(todo, answers, task, endpoint, concurrency, report, sleep, progress))
    return progress


def _check_model(keys: Iterable[str], answers: Answers, model: str) -> None:
    """The texts of two models must not be taken for those of one."""
    for key in keys:
        if record := answers.get(key):
            if record["model"] != model:
                raise UserError(
                    f"{answers.path} holds answers of the model {record['model']!r} to the same "
                    f"questions, not of {model!r}: give another --seed or --out"
                )
            return


async def _ask(
    todo: Iterator[tuple[str, Lead]],
    answers: Answers,
    task: Task,
    endpoint: Endpoint,
    concurrency: int,
    report: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]],
    progress: Progress,
) -> None:
    start = reported = time.monotonic()

    async def work(client: ChatClient) -> None:
        nonlocal reported
        for key, lead in todo:  # shared by all workers: each takes the next
            await _ask_one(client, answers, task, key, lead, progress)
            now = time.monotonic()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                report(progress.line(client, now - start))

    async with ChatClient(endpoint, concurrency, report, sleep) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work(client))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        report(progress.line(client, time.monotonic() - start))


async def _ask_one(
    client: ChatClient, answers: Answers, task: Task, key: str, lead: Lead, progress: Progress
) -> None:
    style = task.style
    asked = messages(style, lead, key, task.num_sentences)
    try:
        answer = await client.ask(asked, style.max_tokens, style.temperature, request_seed(key))
    except GaveUp as error:
        progress.failed += 1
        progress.failed_in_a_row += 1
        if progress.failed_in_a_row >= MAX_FAILURES:
            raise UserError(
                f"{MAX_FAILURES} questions in a row got no answer (last: {error}); what was "
                "answered is kept: see that the endpoint runs, then start again"
            ) from None
        return
    progress.answered += 1
    progress.failed_in_a_row = 0
    answers.add(
        {
            "key": key,
            "source_id": lead.id,
            "style": style.name,
            "seed": task.seed,
            "prompt_version": task.version,
            "model": client.endpoint.model,
            "finish_reason": answer.finish_reason,
            "text": answer.text,
        }
    )
