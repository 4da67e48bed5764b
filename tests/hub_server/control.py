"""Endpoints of the test, not of the hub: faults, settings, the clock, the request log.

They are under `/_control`, are never hit by a fault and do not appear in the log.
"""

from __future__ import annotations

from dataclasses import asdict

from tests.hub_server.faults import Fault
from tests.hub_server.http import HubError, Request, Response
from tests.hub_server.state import State


async def answer(state: State, request: Request) -> Response:
    try:
        return await dispatch(state, request)
    except (ValueError, TypeError) as error:
        raise HubError(400, str(error)) from None


async def dispatch(state: State, request: Request) -> Response:
    what = request.path.removeprefix("/_control/")
    match request.method, what:
        case "GET", "status":
            return Response(
                {"log": state.log, "errors": state.errors, "faults": state.faults.listed()}
            )
        case "POST", "faults":
            state.faults.add(Fault(**await request.json()))
        case "POST", "clear":
            state.faults.clear((await request.json()).get("kind"))
        case "POST", "clear-log":
            state.log.clear()
        case "POST", "settings":
            state.settings.update(await request.json())
            return Response(asdict(state.settings))
        case "POST", "clock":
            state.clock_offset += (await request.json())["advance"]
        case "POST", "forget-object":
            forget(state, (await request.json())["sha256"])
        case _:
            raise HubError(404, f"no control endpoint {what}")
    return Response()


def forget(state: State, sha256: str) -> None:
    """Lose a stored content that commits still name, as the live hub has done."""
    state.object_path(sha256).unlink(missing_ok=True)
    for repo in state.repos.values():
        repo.objects.pop(sha256, None)
