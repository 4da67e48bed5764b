"""Commands on a model: train one alone, write with it, measure it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, UseAppendAction

from diffurefill.commands.common import resolved, say
from diffurefill.config import RunConfig, UserError, load_preset

if TYPE_CHECKING:
    from diffurefill.fleet.loading import LoadedModel


@dataclass
class Demo:
    """The main job on one machine: a fleet that loses members, a model that writes. Minutes."""

    folder: Path | None = None
    """Where the run goes; a new folder below runs/ by default."""
    data: tuple[str, ...] = ()
    """Text to train on: paths, globs or python: (the default)."""
    generations: int = 48
    """Generations to publish (at least 8)."""
    minutes: float = 6.0
    """Stop training after so long, but not before 8 generations are there."""

    def run(self) -> int:
        from diffurefill.demo import run_demo

        return run_demo(self.folder, self.data, self.generations, self.minutes)


@dataclass
class Train:
    """Train on this machine alone, without a fleet; continues where it was interrupted."""

    folder: Positional[Path]
    """Where weights, log and state go."""
    steps: int | None = None
    """Stop at this step; optim.total_steps by default."""
    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section, whose text field is
    --data.sources.0.text-column."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    device: str | None = None
    """cpu, cuda, cuda:1 ...; a GPU by default where there is one."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from diffurefill.fleet.alone import train_alone
        from diffurefill.runtime import require_device, set_threads

        set_threads(self.threads)
        device, config = require_device(self.device), resolved(self.settings, self.data)
        train_alone(self.folder, config, self.steps, say, device=device)
        return 0


@dataclass(kw_only=True)
class _Writing:
    """What generate and infill share."""

    model: Positional[str]
    """A run's store, a folder made by `train` or `export`, or a hub id of either."""
    decode: str | None = None
    """A decode preset (decode-card, decode-left-to-right ...); the run's own by default."""
    weights: str | None = None
    """Of a run: ema (by default), global, swa, or last-3 for the mean of its last three globals."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights while they write. auto: float32 on a CPU, half of it on a GPU."""
    compile: bool = False
    """Write with compiled blocks, up to a minute to compile: for GPUs, where nobody has run it
    yet; on a CPU passes take as long as without."""
    num_samples: int = 1
    """Texts to write of each prompt."""
    seed: int = 0
    """Of the first text; the next has the next number."""
    watch: bool = False
    """Show the canvas pass by pass."""
    save_html: Path | None = None
    """Write that as a page with a slider and a play button."""
    save_gif: Path | None = None
    """Write that as an animated GIF."""
    show_confidence: bool = False
    """Below each text, how likely the model found each token that it wrote, in percent."""
    json: bool = False
    """One JSON object a line and text: prompt, seed, text, ids, confidences (0 to 1), passes."""

    def load(self) -> LoadedModel:
        from diffurefill.fleet.loading import load
        from diffurefill.runtime import default_device, writing_dtype

        dtype = writing_dtype(default_device(), self.dtype)
        return load(self.model, self.weights, dtype, compile=self.compile)

    def views(self) -> Any:
        """Where to show it; UserError where that could not be written."""
        from diffurefill.decode.view.views import Views

        if self.json and self.watch:
            raise UserError("--json and --watch both take the terminal: use --save-html")
        views = Views(terminal=self.watch, page=self.save_html, gif=self.save_gif)
        views.check()
        return views

    def wishes(self, views: Any) -> dict[str, Any]:
        """What both ask of a model."""
        decode = None if self.decode is None else load_preset(self.decode).decode
        return {
            "num_samples": self.num_samples, "decode": decode, "seed": self.seed, "views": views
        }  # fmt: skip

    def tell(self, prompts: Sequence[str], texts: Sequence[Any], tokenizer: Any) -> None:
        """`texts` (WrittenText), `num_samples` of each prompt in turn."""
        from diffurefill.decode.view.frames import printable

        for i, text in enumerate(texts):
            if self.json:
                prompt = prompts[i // self.num_samples]
                say(json.dumps(as_plain(prompt, self.seed + i, text), ensure_ascii=False))
                continue
            # No token may steer a terminal; a file or program gets the text as it is.
            say(printable(text.text) if sys.stdout.isatty() else text.text)
            if self.show_confidence:
                say(f"  {percents(text, tokenizer)}")


def as_plain(prompt: str, seed: int, text: Any) -> dict[str, Any]:
    """A WrittenText for JSON."""
    return {
        "prompt": prompt,
        "seed": seed,
        "text": text.text,
        "ids": text.ids,
        "confidences": [round(p, 6) for p in text.confidences],
        "passes": text.num_passes,
    }


def percents(text: Any, tokenizer: Any) -> str:
    """Each token that was written, in quotes, with the probability it was given."""
    from diffurefill.commands.preview import token_texts

    pieces = token_texts(text.ids, tokenizer)
    pairs = zip(pieces, text.confidences, strict=True)
    return " ".join(f"{json.dumps(piece, ensure_ascii=False)} {100 * p:.0f}%" for piece, p in pairs)


@dataclass(kw_only=True)
class Generate(_Writing):
    """Continue prompts by draft and refill."""

    prompt: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Text to continue; give it several times for several."""
    num_tokens: int = 96
    """Tokens to write."""
    suffix: str = ""
    """Text that stands behind what is written."""
    min_tokens: int = 0
    """No end of text among the first so many tokens; a stop text may end it sooner."""
    stop: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A text ends before this; give it several times for several."""

    def run(self) -> int:
        views, prompts = self.views(), self.prompt or ("",)
        model = self.load()
        texts = model.write(
            prompts,
            self.num_tokens,
            suffix=self.suffix,
            min_tokens=self.min_tokens,
            stop=self.stop,
            **self.wishes(views),
        )
        self.tell(prompts, texts, model.tokenizer)
        return 0


@dataclass(kw_only=True)
class Infill(_Writing):
    """Fill gaps anywhere in a text, both sides in view.

    Each gap is filled to its length: no text ends inside.
    """

    text: str
    """The text, with [MASK*12] where 12 tokens are to be filled; any number of gaps."""

    def run(self) -> int:
        views = self.views()
        model = self.load()
        self.tell((self.text,), model.write_gaps(self.text, **self.wishes(views)), model.tokenizer)
        return 0
