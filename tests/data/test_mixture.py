import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from diffurefill.config import DataConfig, Shares, Source, UserError
from diffurefill.data.cursors import Cursor
from diffurefill.data.documents import Corpus, open_corpus
from diffurefill.data.mixture import (
    Document,
    read_documents,
    require_every_slot,
    slot_of,
    source_of_draw,
)
from diffurefill.data.slots import Slot

SHARES: Shares = (("web", 0.5), ("facts", 0.3), ("code", 0.2))
MakeMix = Callable[..., tuple[DataConfig, Corpus]]


@pytest.fixture
def make_mix(tmp_path: Path) -> MakeMix:
    """`make_mix({"web": 40}, shares, num_slots=2)`: a JSONL file a source, all texts different."""

    def make(
        sizes: dict[str, int], shares: Shares | None = None, num_slots: int = 2
    ) -> tuple[DataConfig, Corpus]:
        from diffurefill.config import Phase

        for name, size in sizes.items():
            lines = [json.dumps({"text": f"{name} {n}"}) for n in range(size)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        sources = tuple(Source(name=n, paths=(str(tmp_path / f"{n}.jsonl"),)) for n in sizes)
        equal = tuple((name, 1 / len(sizes)) for name in sizes)
        data = DataConfig(
            sources=sources, phases=(Phase(shares=shares or equal),), num_slots=num_slots
        )
        return data, open_corpus(data)

    return make


def take(
    corpus: Corpus, shares: Shares, number: int, cursor: Cursor | None = None
) -> Iterator[Document]:
    return read_documents(corpus, shares, Slot(number, 2, 7), cursor or Cursor())


def test_documents_come_by_their_shares() -> None:
    slot = Slot(0, 2, 7)
    drawn = Counter(source_of_draw(SHARES, slot, n) for n in range(100_000))
    for name, share in SHARES:
        sigma = (share * (1 - share) * 100_000) ** 0.5
        assert abs(drawn[name] - share * 100_000) < 3 * sigma


def test_a_draw_is_a_function_of_seed_slot_and_number_alone() -> None:
    first = [source_of_draw(SHARES, Slot(0, 2, 7), n) for n in range(600)]
    assert [source_of_draw(SHARES, Slot(0, 2, 7), n) for n in reversed(range(600))] == first[::-1]
    assert [source_of_draw(SHARES, Slot(1, 2, 7), n) for n in range(600)] != first
    assert [source_of_draw(SHARES, Slot(0, 2, 8), n) for n in range(600)] != first


@pytest.mark.parametrize("shares", [(("a", 0.0), ("b", 1.0)), (("b", 1.0), ("a", 0.0))])
def test_a_source_without_share_is_never_drawn(shares: Shares) -> None:
    assert {source_of_draw(shares, Slot(0, 1, 0), n) for n in range(2_000)} == {"b"}


def test_resuming_after_any_document_equals_the_unbroken_run(make_mix: MakeMix) -> None:
    _, corpus = make_mix({"web": 40, "facts": 9, "code": 15}, SHARES)
    unbroken = list(islice(take(corpus, SHARES, 1), 120))
    assert max(c.epoch for c in unbroken[-1].after.sources.values()) >= 2
    for done in range(0, 120, 7):
        cursor = Cursor.from_json(json.loads(json.dumps(unbroken[done].after.to_json())))
        rest = list(islice(take(corpus, SHARES, 1, cursor), 119 - done))
        assert rest == unbroken[done + 1 :]


def test_a_cursor_inside_a_document_gives_that_document_again(make_mix: MakeMix) -> None:
    _, corpus = make_mix({"web": 20})
    first, second, *_ = islice(take(corpus, (("web", 1.0),), 0), 3)
    cursor = Cursor(1, 5, first.after.sources)
    again = next(take(corpus, (("web", 1.0),), 0, cursor))
    assert (again.text, again.after) == (second.text, second.after)
    assert again.before == cursor


def test_a_small_source_comes_again_while_a_large_one_goes_on(make_mix: MakeMix) -> None:
    _, corpus = make_mix({"web": 400, "facts": 8})
    shares = (("web", 0.5), ("facts", 0.5))
    found = list(islice(take(corpus, shares, 0), 200))
    counts = Counter(document.text for document in found)
    web = [count for text, count in counts.items() if text.startswith("web")]
    facts = [count for text, count in counts.items() if text.startswith("facts")]
    assert set(web) == {1}
    assert max(facts) - min(facts) <= 1
    assert min(facts) > 10
    assert found[-1].after.sources["facts"].epoch >= 10


def test_a_source_of_another_phase_keeps_its_place(make_mix: MakeMix) -> None:
    _, corpus = make_mix({"web": 40, "facts": 40})
    both: Shares = (("web", 0.5), ("facts", 0.5))
    start = list(islice(take(corpus, both, 0), 10))[-1].after
    alone = list(islice(take(corpus, (("web", 1.0),), 0, start), 5))[-1].after
    assert alone.sources["facts"] == start.sources["facts"]
    back = list(islice(take(corpus, both, 0, alone), 60))
    seen = {d.text for d in islice(take(corpus, both, 0), 10)}
    first_epoch = [d.text for d in back if d.after.sources[d.source].epoch == 0]
    assert seen.isdisjoint(first_epoch)


def test_sources_that_no_phase_draws_from_are_not_opened(make_mix: MakeMix, tmp_path: Path) -> None:
    make_mix({"web": 4, "gone": 4})
    (tmp_path / "gone.jsonl").unlink()
    from diffurefill.config import Phase

    sources = tuple(Source(name=n, paths=(str(tmp_path / f"{n}.jsonl"),)) for n in ("web", "gone"))
    phases = (Phase(shares=(("web", 1.0), ("gone", 0.0))),)
    corpus = open_corpus(DataConfig(sources=sources, phases=phases, num_slots=1))
    assert set(corpus.sources) == {"web"}


def test_a_slot_without_a_document_shows_before_training(make_mix: MakeMix) -> None:
    for num_slots in (3, 16):
        data, corpus = make_mix({"web": 400, "facts": 1}, num_slots=num_slots)
        with pytest.raises(UserError, match="source 'facts': lower"):
            require_every_slot(corpus, data, 0)
    data, corpus = make_mix({"web": 40, "facts": 40}, num_slots=3)
    require_every_slot(corpus, data, 0)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_slot_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(UserError, match=r"data\.num_slots is 4"):
        slot_of(DataConfig(num_slots=4), number, 0)


def test_nine_sources_fit_a_small_cursor(make_mix: MakeMix) -> None:
    names = [f"source-{n}" for n in range(9)]
    _, corpus = make_mix(dict.fromkeys(names, 10))
    shares = tuple((name, 1 / 9) for name in names)
    after = list(islice(take(corpus, shares, 0), 200))[-1].after
    assert len(after.sources) == 9
    assert len(json.dumps(after.to_json())) < 2_000
