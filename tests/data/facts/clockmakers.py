"""Small documents to make facts of, and a server's good answers to them."""

from __future__ import annotations

from diffurefill.data.facts.leads import Lead
from diffurefill.runtime import philox
from tests.data.facts.chat_server import Reply, Request, restated

PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Quito", "Delhi", "Perth", "Lagos")
SURNAMES = ("Abel", "Brandt", "Cohen", "Dvorak", "Eriksen", "Fabre", "Gomez", "Haas", "Ito")


def lead(number: int, licence: str = "CC BY-SA 4.0") -> Lead:
    """A short biography that shares few words in a row with any other."""
    draw = philox("lead", number)
    title = f"{draw.choice(SURNAMES)} {number}th"
    born, met, died = (int(year) for year in 1700 + draw.permutation(200)[:3])
    homes = [str(home) for home in draw.permutation(PLACES)[:4]]
    friends = [str(friend) for friend in draw.permutation(SURNAMES)[:4]]
    text = (
        f"{title} was a clockmaker, born in {homes[0]} in {born}. In {met} the workshop moved to "
        f"{homes[1]}, where {friends[0]} and {friends[1]} joined it. A tower clock for {homes[2]} "
        f"made it known; {friends[2]} wrote about it. Death came in {died}, in {homes[3]}, with "
        f"{friends[3]} at the bedside."
    )
    return Lead(f"id-{number}", title, text, licence)


def good(request: Request) -> Reply:
    return Reply(restated(request.title, request.source))
