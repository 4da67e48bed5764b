"""Commands that take a model out of a run: pick its weights, export, import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from diffurefill.commands.common import progress, provenance_as_typed, say
from diffurefill.config import RunConfig, UserError, load_file, load_preset


@dataclass
class Pick:
    """Which weights to release: global, EMA, SWA and means of the last globals on all probes."""

    store: Positional[str]
    """The run's address: ./run, hf://user/repo, s3://bucket/run ..."""
    out: Path = Path("pick.json")
    """Where every figure goes, item by item."""
    last: tuple[int, ...] = (3, 5)
    """Means of so many last globals to try."""
    probe: Path | None = None
    """A probe file instead of the run's own."""
    facts: Path | None = None
    """A fact probe, made by `diffurefill probe facts`."""

    def run(self) -> int:
        import json

        from diffurefill.runtime import require_writable

        require_writable(self.out)
        picked = _pick(self.store, self.last, self.probe, self.facts)
        record = {**picked.to_json(), **provenance_as_typed()}
        # Before the tables: whoever reads those may go away.
        self.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        _show(picked)
        say(f"all figures in {self.out}; `export --weights best --picked {self.out}` uses them")
        return 0


@dataclass
class Export:
    """A model as a folder or hub repository that transformers opens, or as one .pt file."""

    model: Positional[str]
    """A run's store, a folder made by `train`, `export` or `import`, or a hub id."""
    to: str
    """A folder, hf://user/repo, or with --format pt a file."""
    weights: str | None = None
    """Of a run: ema (by default), global, swa, last-3, or best: what `pick` picks."""
    picked: Path | None = None
    """For best: a result of `pick`, instead of picking now."""
    decode: str | None = None
    """A decode preset as the model's default; the run's own otherwise."""
    format: Literal["hf", "pt"] = "hf"
    """hf: what transformers opens. pt: weights and configuration in one torch.save file."""
    replace: bool = False
    """Write over an earlier export. Files in it that no export wrote are kept."""
    public: bool = False
    """A hub repository that has to be made is private without this."""
    results: tuple[Path, ...] = ()
    """Result files for its card (see `card`). Without any, a README.md that is there stays, and
    else that of the export which is exported again."""
    name: str = "DiffuRefill model"
    """The card's title."""
    license: str | None = None
    """Of the weights, as the hub writes licences: apache-2.0, mit ..."""
    language: str | None = None
    """Of the text it learned from: en, de ..."""

    def run(self) -> int:
        from diffurefill.copies import local_copies

        if self.format == "pt" and self.to.startswith("hf://"):
            raise UserError("--format pt writes a file: give --to FILE.pt")
        if self.format == "pt" and self.results:
            raise UserError("--format pt writes a file without a card: leave --results away")
        with local_copies() as cache:
            destination = self._require_room()
            kind, extra = self._chosen(cache)
            source = self._find(kind, cache)
            found = self._decoding(source)
            say(f"exporting {found.name}")
            if self.format == "pt":  # one file: there is no place for a card
                from diffurefill.release.torch_file import write_torch_file

                write_torch_file(found, Path(self.to), replace=self.replace)
                say(f"exported to {self.to}")
                return 0
            extra |= self._for_readers(source, found, destination)
            if destination is not None:
                from diffurefill.release.export import write_checked

                folder = cache / "export"
                folder.mkdir()
                write_checked(found, folder, say, extra)
                destination.publish(folder, f"Export of {found.name}", say)
            else:
                from diffurefill.release.export import export_folder

                export_folder(found, Path(self.to), say, extra, replace=self.replace)
        say(f"exported to {self.to}")
        return 0

    def _find(self, kind: str | None, cache: Path) -> Any:
        from diffurefill.fleet.found import find, locate
        from diffurefill.fleet.run import Run
        from diffurefill.release.flops import with_flops

        found, place = find(self.model, kind, cache), locate(self.model, cache)
        return with_flops(found, place) if isinstance(place, Run) else found

    def _for_readers(self, source: Any, found: Any, destination: Any) -> dict[str, bytes]:
        """The card, unless one that is there stays, and what an export that is exported again has
        beside its model. `found` is `source` with the decoder that was asked for."""
        from diffurefill.fleet.exported import CARD, README
        from diffurefill.release.card.model import model_of
        from diffurefill.release.card.write import HERE, CardOptions, addressed_anew, card_files
        from diffurefill.release.export import kept_files

        kept = kept_files(source)
        card = {name: kept.pop(name) for name in CARD if name in kept}
        stays = self._has_card(destination) and not self.results
        repo = self.to.removeprefix("hf://") if self.to.startswith("hf://") else HERE
        model = model_of(found, self.name)
        if self.results or not (stays or README in card):
            options = CardOptions(self.results, self.name, repo, self.license, self.language)
            return {**kept, **card_files(model, options)}
        say(f"{README} {'stays' if stays else 'goes along'}: --results writes another")
        if stays:
            return kept
        card[README] = addressed_anew(card[README], model_of(source, self.name), model, repo)
        return {**kept, **card}

    def _has_card(self, destination: Any) -> bool:
        from diffurefill.fleet.exported import README

        if destination is not None:
            return destination.has(README)
        return (Path(self.to) / README).exists()

    def _require_room(self) -> Any:
        """Before minutes of work: is there room? The hub's repository, where it goes there."""
        if self.to.startswith("hf://"):
            from diffurefill.release.publish import Destination

            return Destination(self.to, replace=self.replace, public=self.public)
        if self.format == "hf":
            from diffurefill.release.export import require_room
        else:
            from diffurefill.release.torch_file import require_room

        require_room(Path(self.to), self.replace)
        return None

    def _chosen(self, cache: Path) -> tuple[str | None, dict[str, bytes]]:
        """The kind of weights, and the pick that chose it as a file to go with them."""
        import json

        if self.weights != "best":
            if self.picked is not None:
                raise UserError("--picked goes with --weights best")
            return self.weights, {}
        if self.picked is None:
            picked = _pick(self.model)
            _show(picked)
            record = {**picked.to_json(), **provenance_as_typed()}
        else:
            from diffurefill.fleet.exported import read_json_object

            record = read_json_object(self.picked)
            _require_of_now(record, self.model, cache, self.picked)
        return record["picked"], {"pick.json": (json.dumps(record, indent=1) + "\n").encode()}

    def _decoding(self, found: Any) -> Any:
        from dataclasses import replace

        if self.decode is None:
            return found
        config = replace(found.config, decode=load_preset(self.decode).decode)
        return replace(found, config=config)


@dataclass
class Import:
    """Weights from a torch.save file, read without running any of it, as an exported folder."""

    file: Positional[Path]
    """The .pt file."""
    to: Path
    """The folder to make."""
    preset: str | None = None
    """The preset with the model's sizes; a file that `export --format pt` wrote needs none."""
    config: Path | None = None
    """A TOML file laid over the preset."""
    tokenizer: str | None = None
    """tokenizer.json, tokenizer.model, a folder or hf://user/repo; the preset's otherwise."""
    names: Path | None = None
    """JSON: our names of tensors to the file's, one or several to be joined; {} is the block."""
    replace: bool = False
    """Write over an earlier import."""

    def run(self) -> int:
        from diffurefill.copies import local_copies
        from diffurefill.fleet.exported import read_json_object
        from diffurefill.release.export import export_folder, require_room
        from diffurefill.release.torch_file import find_in_torch_file

        require_room(self.to, self.replace)
        config = self._config()
        with local_copies() as work:
            found = find_in_torch_file(
                self.file,
                work,
                config=config,
                tokenizer=self._tokenizer(config),
                names=read_json_object(self.names) if self.names else None,
            )
            export_folder(found, self.to, say, replace=self.replace)
        say(f"imported to {self.to}")
        return 0

    def _config(self) -> RunConfig | None:
        if self.preset is None and self.config is None:
            return None
        base = load_preset(self.preset) if self.preset else RunConfig()
        return load_file(self.config, base) if self.config else base

    def _tokenizer(self, config: RunConfig | None) -> Any:
        from diffurefill.data.tokens.tokenizer import load_tokenizer

        spec = self.tokenizer or (config.data.tokenizer if config else "train")
        return None if spec == "train" else load_tokenizer(spec)


def _pick(
    store: str,
    last: tuple[int, ...] = (3, 5),
    probe: Path | None = None,
    facts: Path | None = None,
) -> Any:
    from diffurefill.copies import local_copies
    from diffurefill.fleet.found import locate
    from diffurefill.fleet.probing import Asked
    from diffurefill.fleet.run import Run
    from diffurefill.release.pick import pick_weights

    with local_copies() as cache:
        run = locate(store, cache)
        if not isinstance(run, Run):
            raise UserError(f"{store} holds one set of weights: there is nothing to pick from")
        picked = pick_weights(
            run, progress, last=last, asked=Asked(probe_file=probe, facts_file=facts)
        )
    progress("")
    return picked


def _show(picked: Any) -> None:
    from rich.console import Console

    from diffurefill.commands.probe_tables import score_tables
    from diffurefill.release.pick import RULE

    Console().print(*score_tables([c.scores for c in picked.candidates]))
    for kind, why in picked.missing.items():
        say(f"without {kind}: {why}")
    for kind, names in picked.out().items():
        say(f"out: {kind}, worse than {picked.leader} on {', '.join(names)}")
    say(f"picked {picked.kind} (rule: {RULE})")


def _require_of_now(record: dict[str, Any], model: str, cache: Path, path: Path) -> None:
    """UserError unless the pick is of this run's newest generation."""
    from diffurefill.fleet.found import locate
    from diffurefill.fleet.run import Run

    run = locate(model, cache)
    state = run.snapshot().state if isinstance(run, Run) else None
    is_pick = record.get("result") == "pick" and isinstance(record.get("picked"), str)
    if not is_pick or state is None or record.get("run_id") != state.run_id:
        raise UserError(f"{path} is not a pick of {model}: leave out --picked to pick now")
    if record.get("generation") != state.gen:
        raise UserError(
            f"{path} picked at generation {record.get('generation')}, the run is at {state.gen}: "
            "pick again, or leave out --picked"
        )
