"""Scoring any number of models, one at a time in memory, on the probes that lie with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffurefill.config import UserError
from diffurefill.copies import local_copies
from diffurefill.data.tokens.tokenizer import Tokenizer, load_tokenizer
from diffurefill.evaluate.facts.probe import FactProbe, load_fact_probe
from diffurefill.evaluate.probe_sets import Probes, load_probes
from diffurefill.evaluate.scores import Scores, require_same_probes, score
from diffurefill.fleet.following import ProbeLog, following
from diffurefill.fleet.found import find_each, found_in_run
from diffurefill.fleet.loading import LoadedModel, build
from diffurefill.fleet.run import open_run
from diffurefill.fleet.start import drive
from diffurefill.fleet.weights import PUBLISHED
from diffurefill.train.checkpoint import load_weights


@dataclass(frozen=True)
class Asked:
    """What is asked of every model."""

    sets: Sequence[str] = ()
    """Names of probe sets; all that a model has where empty."""
    probe_file: Path | None = None
    """Probes for every model instead of its own."""
    facts_file: Path | None = None
    """A fact probe."""


def score_models(
    places: Sequence[str], asked: Asked, weights: Sequence[str] = PUBLISHED
) -> Iterator[Scores]:
    """The scores of every model at `places`, each as soon as it is known. Raises UserError at the
    first whose probes are not those of the first model."""
    if not places:
        raise UserError("name at least one model to probe: a run, a folder or a hub id")
    first: Scores | None = None
    for where in places:
        for model in models_at(where, weights):
            name = model.name if model.name.startswith(where) else f"{where}: {model.name}"
            found = score_model(model, name, asked)
            first = first or found
            require_same_probes(found, first)
            yield found


def models_at(where: str, weights: Sequence[str] = PUBLISHED) -> Iterator[LoadedModel]:
    """Of a run those of `weights` that it has; of anything else the one model that it holds."""
    with local_copies() as cache:
        for found in find_each(where, weights, cache):
            yield build(found)


def score_model(model: LoadedModel, name: str, asked: Asked) -> Scores:
    """Raises UserError where a probe is of another vocabulary than the model's."""
    return score(
        name,
        model.denoiser,
        probes_for(model, name, asked),
        specials=model.specials,
        device=model.device,
        decoding_passes=model.config.probe.decoding_passes,
        decode=model.tokenizer.decode_inner,
        facts=facts_for(model, asked),
    )


def probes_for(model: LoadedModel, name: str, asked: Asked) -> Probes:
    """The probes to score `model` on. Raises UserError where a set that is asked for is missing,
    and where the file is of another vocabulary."""
    probes: Probes = model.probes
    if asked.probe_file is not None:
        probes = load_probes(asked.probe_file, model.tokenizer.vocabulary_digest)
        if max(int(probe.ids.max()) for probe in probes.values()) >= model.config.model.vocab_size:
            raise UserError(
                f"the probe file {asked.probe_file} says nothing of its vocabulary and has ids "
                "beyond the model's: take the one that lies with a run of this tokenizer"
            )
    if not probes and (asked.sets or asked.facts_file is None):
        raise UserError(f"{name} came without probes: give a file of them (--probe)")
    missing = [set_name for set_name in asked.sets if set_name not in probes]
    if missing:
        raise UserError(
            f"{name} has no probe set {', '.join(missing)}: there are {', '.join(probes)}"
        )
    return {set_name: probes[set_name] for set_name in asked.sets or probes}


def facts_for(model: LoadedModel, asked: Asked) -> FactProbe | None:
    if asked.facts_file is None:
        return None
    return load_fact_probe(asked.facts_file, model.tokenizer.vocabulary_digest)


def tokenizer_at(where: str) -> Tokenizer:
    """The tokenizer of a run, of a model's folder, or one that `data.tokenizer` could name."""
    path = Path(where)
    is_bucket = where.startswith(("s3://", "gs://", "az://", "hf://buckets/"))
    is_bare = path.is_dir() and not any(path.glob("tokenizer.*"))
    if not (is_bucket or is_bare):
        return load_tokenizer(where)
    with local_copies() as cache:
        return Tokenizer.from_json(open_run(where, cache).tokenizer_json)


def follow_run(
    uri: str,
    log: Path,
    asked: Asked,
    kinds: Sequence[str],
    until: int | None,
    report: Callable[[str], None],
) -> None:
    """Probe each generation of the run at `uri` as it is published; see following.py.

    Raises UserError for `kinds` that are never published.
    """
    if made := [kind for kind in kinds if kind not in PUBLISHED]:
        raise UserError(
            f"nobody publishes {', '.join(made)}: follow {', '.join(PUBLISHED)}, and probe a mean "
            "of the last globals without --follow"
        )
    with local_copies() as cache:
        run = open_run(uri, cache)
        model = build(found_in_run(run, "global"))
        probes, facts = probes_for(model, uri, asked), facts_for(model, asked)
        versions = {name: probe.digest for name, probe in probes.items()}
        if facts is not None:
            versions["facts"] = facts.digest
        about = {"run": run.snapshot().state.run_id, "probes": versions}

        def score_file(weights: Path) -> dict[str, Any]:
            model.denoiser.load_state_dict(load_weights(weights))
            return score_model(model, uri, asked).brief()

        drive(
            following(
                run, score_file, ProbeLog(log, about), kinds=kinds, until=until, report=report
            )
        )
