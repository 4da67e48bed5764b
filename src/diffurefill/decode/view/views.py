"""Where a finished generation is shown: the terminal, a page, a GIF, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffurefill.decode.record import Pass
from diffurefill.decode.view.frames import Decode, frames, title
from diffurefill.decode.view.gif import require_pillow, save_gif
from diffurefill.decode.view.page import Sample, page
from diffurefill.decode.view.terminal import Viewer, replay
from diffurefill.runtime import require_writable


@dataclass(frozen=True, kw_only=True)
class Views:
    """`Views(terminal=True, page=Path("filling.html"))`; all that are named."""

    terminal: bool = False
    page: Path | None = None
    gif: Path | None = None

    def __bool__(self) -> bool:
        return self.terminal or self.page is not None or self.gif is not None

    def check(self) -> None:
        """UserError now, before a model works, for what could not be shown afterwards."""
        for path in (self.page, self.gif):
            if path is not None:
                require_writable(path)
        if self.gif is not None:
            require_pillow()

    def show(self, trajectory: Sequence[Pass], decode: Decode) -> None:
        """Every row; in the terminal and the GIF one after another."""
        if not self:
            return
        assert trajectory, "a generation whose passes were kept"
        rows = range(len(trajectory[0].ids))
        samples = [_sample(trajectory, decode, row) for row in rows]
        if self.page is not None:
            self.page.write_text(page(samples), "utf-8")
        if self.gif is not None:
            save_gif([sample.frames for sample in samples], self.gif)
        for sample in samples if self.terminal else ():
            replay(sample.frames, Viewer())


def _sample(trajectory: Sequence[Pass], decode: Decode, row: int) -> Sample:
    shown = frames(trajectory, decode, row)
    return Sample(f"{row + 1}: {title(shown)}", shown)
