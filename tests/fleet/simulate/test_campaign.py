"""Seeds tallied in pieces add up to what they are in one; a replay tells all."""

import json

import pytest

from diffurefill.config import UserError
from diffurefill.fleet.simulate import campaign
from diffurefill.fleet.simulate.chaos import run_seed


def test_pieces_add_up() -> None:
    whole = campaign.tally(range(4))
    pieces = campaign.added([campaign.tally(range(2)), campaign.tally(range(2, 4))])
    assert json.loads(json.dumps(pieces)) == {**whole, "digests": pieces["digests"]}
    assert pieces["digests"] == [campaign.tally(part)["digests"][0] for part in ([0, 1], [2, 3])]
    assert pieces["seeds"] == 4
    assert pieces["violations"] == 0


def test_a_replay_tells_every_event_and_the_outcome() -> None:
    lines: list[str] = []
    assert campaign.replay(5, "bytes", lines.append) == []
    outcome = run_seed(5, "bytes", keep_trace=True)
    assert lines[:-1] == outcome.trace
    assert outcome.trace_hash[:16] in lines[-1]


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="no profile 'sunshine': it is one of network, "):
        campaign.replay(5, "sunshine")
