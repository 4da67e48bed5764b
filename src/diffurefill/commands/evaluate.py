"""`diffurefill evaluate`: models on the report's benchmarks, side by side and in pairs;
`diffurefill lm-eval`: the harness's own command with our models in it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from diffurefill.commands.common import RIGHT_MASKS, progress, say
from diffurefill.config import UserError

if TYPE_CHECKING:
    from diffurefill.evaluate.likelihood.scorer import Scorer

Method = Literal["chain", "right_to_left", "confidence", "margin", "entropy", "elbo"]


@dataclass
class Evaluate:
    """Zero-shot benchmarks through lm-evaluation-harness, with intervals and paired differences."""

    models: Positional[tuple[str, ...]]
    """Stores or folders of ours; hf:PATH_OR_ID for an autoregressive model (a .gguf file too);
    random:MODEL for that model untrained."""
    tasks: str = "all"
    """Comma-separated: hellaswag, arc_easy, arc_challenge, piqa, winogrande, openbookqa, sciq,
    lambada_openai, mmlu."""
    data_dir: Path | None = None
    """A folder with the tasks' rows (hellaswag_validation.jsonl[.gz] ...); the hub by default."""
    limit: int | None = None
    """Items of each task, evenly spaced over its file; all by default."""
    scorer: Method = "chain"
    """chain: exact, left to right. right_to_left, confidence, margin, entropy: exact for the
    sampler of that order. elbo: a Monte Carlo bound."""
    tokens_per_pass: int = 1
    """Of the sampler whose likelihood is taken: k tokens a pass make n / k rows of n tokens."""
    right_masks: int = RIGHT_MASKS
    """MASKs behind the continuation: room for the text to go on. 0: it ends with its last token,
    where a model trained on whole documents expects EOS."""
    samples: int = 32
    """Masks of an elbo estimate."""
    guidance: float = 0.0
    """Unsupervised classifier-free guidance."""
    screen: Literal["two_stream"] | None = None
    """two_stream: score by one approximate pass, and by the chain only where choices are close."""
    rescore: float = 0.2
    """Share of a screened task's items, the closest ones, that the chain scores."""
    weights: str | None = None
    """Of a run: ema, global, swa, last-3 ...; its newest EMA by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU that has it."""
    max_length: int | None = None
    """Tokens of a row; the length of training by default."""
    batch_tokens: int | None = None
    """Tokens of a forward pass of ours."""
    batch_rows: int = 16
    """Rows of a batch of the harness's own backend."""
    seed: int = 0
    """Of the masks of elbo, of untrained weights (random:) and of the intervals."""
    threads: int | None = None
    """Limit on CPU threads; all cores by default."""
    out: Path | None = None
    """Write everything, every item too, to this JSON file."""

    def run(self) -> int:
        from rich.console import Console

        from diffurefill.evaluate.harness.table import accuracy_table, pair_table
        from diffurefill.runtime import require_writable, set_threads

        if self.out is not None:
            require_writable(self.out)
        set_threads(self.threads)
        record = evaluate(self)
        if self.out is not None:
            # Before the tables: whoever reads those may go away.
            self.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        console = Console()
        console.print(accuracy_table(record["models"]))
        if record["pairs"]:
            console.print(pair_table(record["pairs"]))
        for line in notes(record):
            say(line)
        if self.out is not None:
            say(f"written to {self.out}")
        return 0


def evaluate(options: Evaluate) -> dict[str, Any]:
    """The record of all models on all tasks."""
    from diffurefill.runtime import provenance

    require_harness()
    from diffurefill.evaluate.harness.results import compare, quiet_harness, run_tasks, versions
    from diffurefill.evaluate.harness.tasks import chosen, load_tasks

    if not options.models:
        raise UserError("name at least one model to evaluate")
    if options.limit is not None and options.limit < 1:
        raise UserError("--limit must be at least 1")
    quiet_harness()
    benchmarks = chosen(options.tasks)
    tasks = load_tasks(benchmarks, options.data_dir)
    models = []
    for where, name in zip(options.models, short_names(options.models), strict=True):
        progress(f"loading {name}")
        lm, facts = _open(where, name, options, any(one.needs_greedy for one in benchmarks))
        found = run_tasks(lm, tasks, options.limit)
        models.append({"name": name, **facts, **_work(lm), "tasks": found})
    progress("")
    return {
        "models": models,
        "pairs": compare(models),
        "limit": options.limit,
        "versions": versions(),
        **provenance(command_line(options)),
    }


def command_line(options: Evaluate) -> str:
    """The command that `options` come from, without the folders of this machine."""
    from diffurefill.runtime import without_folders

    words = ["diffurefill evaluate", *map(without_folders, options.models)]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name != "models" and value != field.default:
            shown = value.name if isinstance(value, Path) else value
            words.append(f"--{field.name.replace('_', '-')} {shown}")
    return " ".join(words)


def _open(
    where: str, name: str, options: Evaluate, needs_greedy: bool
) -> tuple[Any, dict[str, Any]]:
    from diffurefill.commands.scored_models import Reading, open_lm

    how = Reading(
        weights=options.weights,
        dtype=options.dtype,
        max_length=options.max_length,
        batch_tokens=options.batch_tokens,
        batch_rows=options.batch_rows,
        seed=options.seed,
        progress=lambda done, total: progress(f"{name}: {done} of {total} requests"),
    )
    return open_lm(where, _scorer(options, check_greedy=needs_greedy), how)


def _scorer(options: Evaluate, *, check_greedy: bool) -> Scorer:
    from diffurefill.evaluate.likelihood.scorer import Scorer

    return Scorer(
        method=options.scorer,
        tokens_per_pass=options.tokens_per_pass,
        right_masks=options.right_masks,
        samples=options.samples,
        guidance=options.guidance,
        seed=options.seed,
        check_greedy=check_greedy,
        screen=options.screen,
        rescore=options.rescore,
    )


def _work(lm: Any) -> dict[str, Any]:
    """What scoring took, of a model of ours; the harness's backends do not count."""
    if not hasattr(lm, "cost"):
        return {"cost": None}
    return {
        "cost": lm.cost.to_json(),
        "num_truncated": lm.num_truncated,
        "num_too_long": lm.num_too_long,
    }


def notes(record: dict[str, Any]) -> list[str]:
    """What a reader of the table must know beside it."""
    lines = []
    if "sciq" in record["models"][0]["tasks"]:
        split = record["models"][0]["tasks"]["sciq"]["split"]
        official = "" if split == "test" else " (the harness scores test)"
        lines.append(f"SciQ is its {split} split{official}.")
    if record["limit"] is not None:
        lines.append(f"{record['limit']} items of each task, evenly spaced over its file.")
    for model in record["models"]:
        cost = model["cost"]
        if cost is not None:
            lines.append(
                f"{model['name']}: {cost['rows_read']:,} rows of {cost['rows_asked']:,} asked for, "
                f"{cost['forward_tokens']:,} tokens in {cost['num_forward_passes']:,} passes; "
                f"{model['num_truncated']} contexts cut, {model['num_too_long']} too long."
            )
        screened = [task for task in model["tasks"].values() if "num_approximate" in task]
        if screened:
            rough, all_of_them = (
                sum(task[key] for task in screened)
                for key in ("num_approximate", "num_log_likelihoods")
            )
            lines.append(
                f"{model['name']}: {rough:,} of {all_of_them:,} log-likelihoods are a screen's, "
                "approximate; --out marks them."
            )
    return lines


def short_names(models: Sequence[str]) -> list[str]:
    """Names without the folders they lie in; numbered where two are the same."""
    from diffurefill.runtime import without_folders

    names = [without_folders(model) for model in models]
    return [
        f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


@dataclass
class LmEval:
    """lm-evaluation-harness with our models in it: every flag of lm-eval, --model diffurefill."""

    arguments: Annotated[tuple[str, ...], tyro.conf.arg(name="")]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> LmEval:
        """Everything goes to lm-eval as it is; only a bare --help is answered here."""
        if not arguments or arguments[0] in ("-h", "--help"):
            say(LM_EVAL_USAGE)
            raise SystemExit(0 if arguments else 2)
        return cls(tuple(arguments))

    def run(self) -> int:
        require_harness()
        import lm_eval.models  # noqa: F401  first: registering before it would hide its models
        from lm_eval.__main__ import cli_evaluate

        import diffurefill.commands.lm_eval_model  # noqa: F401  registers `diffurefill`

        if "--use_cache" in self.arguments:
            progress("")
            print(
                "note: --use_cache tells answers apart by their texts alone: give every model and "
                "scorer a file of its own",
                file=sys.stderr,
            )
        sys.argv = ["diffurefill lm-eval", *self.arguments]
        cli_evaluate()
        return 0


LM_EVAL_USAGE = """\
usage: diffurefill lm-eval [run] --model diffurefill --model_args pretrained=FOLDER[,key=value ...]
                           --tasks ...

lm-evaluation-harness's own command (diffurefill lm-eval run --help shows its flags) that also knows
--model diffurefill. Its model arguments: pretrained (a store or folder), weights, scorer,
tokens_per_pass, right_masks, samples, guidance, check_greedy, decode (a decode preset for generated
answers), max_length, dtype, batch_tokens, seed."""


def require_harness() -> None:
    """UserError where lm-eval is not installed."""
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("benchmarks need lm-evaluation-harness: pip install 'diffurefill[eval]'")
