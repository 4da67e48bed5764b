"""From documents to a filtered corpus, with a server that answers, lies, fails and hangs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from diffurefill.config import UserError
from diffurefill.data.facts.answers import Answers
from diffurefill.data.facts.ask import MAX_FAILURES, Progress, Task, ask_all, task
from diffurefill.data.facts.corpus import build_corpus
from diffurefill.data.facts.endpoint import Endpoint
from diffurefill.data.facts.leads import Lead
from diffurefill.data.facts.outputs import manifest_path
from diffurefill.data.facts.prompts import STYLES, answer_key
from tests.data.facts.chat_server import Reply, Request, Script, Server, restated, serve
from tests.data.facts.clockmakers import good, lead


async def no_wait(seconds: float) -> None:
    pass


def run(
    folder: Path,
    leads: Iterable[Lead],
    server: Server,
    asked: Task | None = None,
    concurrency: int = 4,
    timeout_seconds: float = 30.0,
) -> tuple[Progress, dict[str, Any], list[dict[str, Any]]]:
    """Ask and build; returns the progress, the manifest and the records."""
    asked = asked or task("restate", 0, 8, frozenset())
    answers = Answers(folder / "answers.jsonl")
    endpoint = Endpoint(server.url, "tiny", timeout_seconds=timeout_seconds)
    try:
        progress = ask_all(leads, answers, asked, endpoint, concurrency, print, no_wait)
        manifest = build_corpus(leads, answers, asked, folder / "facts.jsonl", {"model": "tiny"})
    finally:
        answers.close()
    records = [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]
    assert json.loads(manifest_path(folder / "facts.jsonl").read_text()) == json.loads(
        json.dumps(manifest)
    )
    return progress, manifest, records


def titled(replies: dict[str, Reply], otherwise: Script = good) -> Script:
    return lambda request: replies.get(request.title) or otherwise(request)


def test_good_answers_become_records_in_the_order_of_the_leads(tmp_path: Path):
    leads = [lead(n, "CC0" if n < 5 else "CC BY-SA 4.0") for n in range(30)]
    with serve(good) as server:
        progress, manifest, records = run(tmp_path, leads, server)
    assert (progress.total, progress.stored, progress.answered, progress.failed) == (30, 0, 30, 0)
    assert [record["source_id"] for record in records] == [one.id for one in leads]
    first = leads[0]
    assert records[0] == {
        "text": restated(first.title, first.text),
        "source_id": first.id,
        "title": first.title,
        "licence": "CC0",
        "style": "restate",
    }
    assert manifest["licences"] == {"CC BY-SA 4.0": 25, "CC0": 5}
    assert (manifest["questions"], manifest["texts"], manifest["kept_texts"]) == (30, 30, 30)
    assert {found["count"] for found in manifest["rejected"].values()} == {0}
    assert (manifest["model"], manifest["style"], manifest["seed"]) == ("tiny", "restate", 0)
    assert manifest["prompt_version"] == task("restate", 0, 8, frozenset()).version
    assert "share-alike" in manifest["licence_note"]


def test_each_kind_of_bad_answer_is_refused_by_its_rule(tmp_path: Path):
    leads = [lead(n) for n in range(12)]
    texts = [restated(one.title, one.text) for one in leads]
    bad = {
        "length": Reply("Too short."),
        "ending": Reply(texts[1], finish_reason="length"),
        "echo": Reply("Here is the text: " + texts[2]),
        "copied share": Reply(leads[3].text),
        "numbers": Reply(texts[4].replace("in turn:", "in turn, 98765 of them:")),
        "names": Reply(
            texts[5].replace("in turn:", "from " + ", ".join(["Zebulon Quark"] * 9) + ":")
        ),
        "near-duplicate": Reply(texts[0].replace("from these lines", "from those lines")),
    }
    leads[6] = lead(0)._replace(id="again", title="Another")
    replies = dict(zip((one.title for one in leads), bad.values(), strict=False))
    replies[leads[0].title], replies["Another"] = Reply(texts[0]), bad["near-duplicate"]
    replies[leads[7].title] = bad["length"]
    with serve(titled(replies)) as server:
        _, manifest, records = run(tmp_path, leads, server)
    counts = {rule: found["count"] for rule, found in manifest["rejected"].items()}
    assert counts == {**dict.fromkeys(bad, 1), "subject": 0, "copied run": 0}
    assert [record["source_id"] for record in records] == [
        "id-0",
        *(f"id-{n}" for n in range(8, 12)),
    ]
    for rule in bad:
        (example,) = manifest["rejected"][rule]["examples"]
        assert example["text"]
        assert manifest["rejected"][rule]["share"] == round(1 / 12, 4)
    assert manifest["rejected"]["copied share"]["examples"][0]["source_id"] == "id-3"


def test_the_lines_that_pass_become_one_text(tmp_path: Path):
    leads = [lead(0), lead(1)]
    lines = [
        f"{leads[0].title} made clocks for a living.",
        f"{leads[0].title} lived to be 98765.",
        f"{leads[0].title} made clocks, for a living!",
        f"A tower clock is the work of {leads[0].title}.",
    ]
    replies = {
        leads[0].title: Reply("\n".join(f"{n}. {line}" for n, line in enumerate(lines, 1))),
        leads[1].title: Reply(
            f"{leads[1].title} made clocks for a living.\nIt was", finish_reason="length"
        ),
    }
    with serve(titled(replies)) as server:
        _, manifest, records = run(tmp_path, leads, server, task("sentences", 0, 4, frozenset()))
    assert "Write 4 sentences" in server.requests[0].body["messages"][1]["content"]
    assert [record["text"] for record in records] == [
        f"{lines[0]}\n{lines[3]}",
        f"{leads[1].title} made clocks for a living.",
    ]
    assert (manifest["texts"], manifest["kept_texts"], manifest["records"]) == (5, 3, 2)
    assert manifest["rejected"]["near-duplicate"]["count"] == 1


def test_troubles_that_pass_lose_no_answer(tmp_path: Path):
    leads = [lead(n) for n in range(12)]
    seen: Counter[str] = Counter()

    def troubled(request: Request) -> Reply:
        seen[request.title] += 1
        number = [one.title for one in leads].index(request.title)
        if number < 6 and seen[request.title] == 1:
            return [Reply("busy", status=500), Reply("slow", status=429), Reply(action="hang")][
                number % 3
            ]
        return good(request)

    with serve(troubled) as server:
        progress, _, records = run(tmp_path, leads, server, timeout_seconds=0.5)
    assert (progress.answered, progress.failed, len(records)) == (12, 0, 12)
    assert sorted(Counter(server.asked()).values()) == [1] * 6 + [2] * 6


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path):
    """No question with a stored answer is asked again, whatever was under way."""
    leads = [lead(n) for n in range(40)]
    rest = task("restate", 0, 8, frozenset())

    class Killed(BaseException):
        pass

    class Dying(Answers):
        def add(self, record: dict[str, Any]) -> None:
            super().add(record)
            if len(self) == 17:
                raise Killed

    with serve(good) as server:
        dying = Dying(tmp_path / "answers.jsonl")
        with pytest.raises(Killed):
            ask_all(leads, dying, rest, Endpoint(server.url, "tiny"), 4, print, no_wait)
        dying.close()
        with open(tmp_path / "answers.jsonl", "ab") as file:
            file.write(b'{"key": "torn')
        stored = {
            json.loads(line)["source_id"]
            for line in (tmp_path / "answers.jsonl").read_text().splitlines()[:-1]
        }
        assert 17 <= len(stored) < 17 + 4
    # A server of its own: what was under way may still arrive at the first.
    with serve(good) as server:
        progress, manifest, records = run(tmp_path, leads, server)
    assert (progress.stored, progress.answered) == (len(stored), 40 - len(stored))
    asked_again = {request.title for request in server.requests}
    assert asked_again == {one.title for one in leads if one.id not in stored}
    assert len(server.requests) == progress.answered
    with serve(good) as server:
        (tmp_path / "unbroken").mkdir()
        unbroken = run(tmp_path / "unbroken", leads, server, concurrency=1)
        assert (manifest, records) == unbroken[1:]
        requests = len(server.requests)
        assert run(tmp_path / "unbroken", leads, server)[1:] == unbroken[1:]
        assert len(server.requests) == requests


def test_no_more_questions_than_allowed_are_under_way(tmp_path: Path):
    leads = [lead(n) for n in range(30)]
    with serve(good) as server:
        run(tmp_path, leads, server, concurrency=3)
    assert server.most_in_flight <= 3


def test_a_question_without_answer_is_counted_and_asked_the_next_time(tmp_path: Path):
    leads = [lead(n) for n in range(6)]
    with serve(titled({leads[2].title: Reply("too long", status=400)})) as server:
        progress, manifest, records = run(tmp_path, leads, server)
        assert (progress.failed, manifest["unanswered"], len(records)) == (1, 1, 5)
    with serve(good) as server:
        progress, manifest, records = run(tmp_path, leads, server)
        assert (progress.stored, manifest["unanswered"], len(records)) == (5, 0, 6)
        assert server.asked() == [leads[2].title]


def test_an_endpoint_that_is_gone_stops_the_run_and_keeps_the_answers(tmp_path: Path):
    leads = [lead(n) for n in range(10 + 3 * MAX_FAILURES)]
    known = {one.title for one in leads[:10]}
    with serve(lambda r: good(r) if r.title in known else Reply("gone", status=400)) as server:
        with pytest.raises(UserError, match=r"20 questions in a row.*HTTP 400: gone.*start again"):
            run(tmp_path, leads, server)
        assert len(server.requests) < 10 + 2 * MAX_FAILURES
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 10
    assert not (tmp_path / "facts.jsonl").exists()


def test_a_wrong_key_stops_the_run_at_once(tmp_path: Path):
    leads = [lead(n) for n in range(50)]
    with serve(lambda request: Reply("no", status=401)) as server:
        with pytest.raises(UserError, match="refuses the key"):
            run(tmp_path, leads, server)
        assert len(server.requests) <= 4


def test_answers_of_another_model_are_not_taken(tmp_path: Path):
    with serve(good) as server:
        run(tmp_path, [lead(0)], server)
        answers = Answers(tmp_path / "answers.jsonl")
        with pytest.raises(
            UserError, match=r"answers of the model 'tiny'.*another --seed or --out"
        ):
            ask_all(
                [lead(0)],
                answers,
                task("restate", 0, 8, frozenset()),
                Endpoint(server.url, "huge"),
                1,
                print,
            )
        answers.close()


def test_held_out_subjects_are_never_asked_about(tmp_path: Path):
    leads = [lead(n) for n in range(6)]
    out = frozenset({leads[1].title.casefold()})
    leads[1] = leads[1]._replace(title=f"{leads[1].title} (clockmaker)")
    with serve(good) as server:
        progress, *_ = run(tmp_path, leads, server, task("restate", 0, 8, out))
    assert progress.total == 5
    assert leads[1].title not in server.asked()


def test_a_repeated_id_is_one_question(tmp_path: Path):
    with serve(good) as server:
        progress, manifest, _ = run(tmp_path, [lead(0), lead(1), lead(0)], server)
    assert (progress.total, len(server.requests), manifest["questions"]) == (2, 2, 2)


def test_where_nothing_passes_no_corpus_is_written(tmp_path: Path):
    with serve(lambda request: Reply("No.")) as server:
        with pytest.raises(
            UserError, match=r"none of 3 texts passes.*most break the rule 'length'"
        ):
            run(tmp_path, [lead(n) for n in range(3)], server)
        with pytest.raises(UserError, match="no lead to ask about"):
            run(tmp_path, [], server)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_question_is_named_by_lead_style_seed_and_prompt():
    sentences, restate = STYLES["sentences"], STYLES["restate"]
    keys = {
        answer_key(lead(0), restate, 0, "v"),
        answer_key(lead(1), restate, 0, "v"),
        answer_key(lead(0), sentences, 0, "v"),
        answer_key(lead(0), restate, 1, "v"),
        answer_key(lead(0), restate, 0, "w"),
    }
    assert len(keys) == 5
    assert answer_key(lead(0)._replace(title="x"), restate, 0, "v") in keys
    versions = {task(style, 0, num, frozenset()).version for style in STYLES for num in (4, 8)}
    assert len(versions) == 3  # the number of sentences is part of one prompt only


def test_a_lead_draws_one_of_the_forms_by_its_key(tmp_path: Path):
    with serve(good) as server:
        run(tmp_path, [lead(n) for n in range(40)], server)
    starts = Counter(r.body["messages"][1]["content"].split()[0] for r in server.requests)
    assert set(starts) == {"Tell", "Make", "Explain"}
    assert len({r.body["seed"] for r in server.requests}) == 40
