"""python -m tests.hub_server [--folder DIR] [--port-file FILE]

Prints the hub's URL on the first line and the blob origin's on the second, then serves until its
standard input ends or it is interrupted. With --port-file the two lines are written there too.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from tests.hub_server.server import serving


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub_server")
    parser.add_argument("--folder", type=Path, help="where contents go (default: a temporary one)")
    parser.add_argument("--port-file", type=Path, help="also write the two URLs to this file")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(serving(folder))
        lines = f"{hub.state.hub_url}\n{hub.state.blob_url}\n"
        if args.port_file is not None:
            partial = args.port_file.with_name(args.port_file.name + ".partial")
            partial.write_text(lines)
            partial.replace(args.port_file)
        print(lines, end="", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()


if __name__ == "__main__":
    main()
