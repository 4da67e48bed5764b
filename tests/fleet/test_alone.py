"""`train`: interrupted and resumed, the same weights bit for bit; mistakes change nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from diffurefill.cli import main
from diffurefill.config import Phase, RunConfig, Source, UserError, load_preset
from diffurefill.decode import batches
from diffurefill.decode.view.views import Views
from diffurefill.fleet import alone
from diffurefill.fleet.alone import train_alone
from diffurefill.fleet.loading import load
from diffurefill.store.base import open_store
from diffurefill.train import micro_batch
from diffurefill.train.checkpoint import load_training_state
from diffurefill.train.loop import Trainer
from diffurefill.train.micro_batch import USABLE, footprint
from tests.tiny import tiny_config, write_config, write_corpus


def quiet(line: str) -> None:
    pass


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    state = load_training_state(folder)
    assert state is not None
    return state.weights


def logged_steps(folder: Path) -> list[int]:
    return [record["step"] for record in logged(folder)]


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, in strict JSON."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    lines = (folder / alone.LOG).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


class Killed(BaseException):
    pass


def mixed_config(folder: Path) -> RunConfig:
    """Two sources, a phase from step 5, spans and short rows; intervals of 4 steps."""
    config = tiny_config(write_corpus(folder))
    (folder / "facts.txt").write_text("\n\n".join(f"Anna Lee, {n}." * 300 for n in range(40)))
    sources = (
        replace(config.data.sources[0], name="web"),
        Source(name="facts", paths=(str(folder / "facts.txt"),)),
    )
    phases = (
        Phase(shares=(("web", 1.0),)),
        Phase(from_step=5, shares=(("web", 0.5), ("facts", 0.5)), span_rows=0.5),
    )
    data = replace(config.data, sources=sources, phases=phases, short_rows=0.3, short_length=8)
    return replace(config, data=data)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_killed_and_resumed_equals_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    config = mixed_config(tmp_path) if mixed else tiny_config(write_corpus(tmp_path))
    train_alone(tmp_path / "whole", config, 12, quiet)
    take_step = Trainer.take_step

    def dies_at(step: int):
        def take(self: Trainer):
            if self.step == step:
                raise Killed
            return take_step(self)

        return take

    for step in (6, 9):  # between two saves, twice
        monkeypatch.setattr(Trainer, "take_step", dies_at(step))
        with pytest.raises(Killed):
            train_alone(tmp_path / "broken", config, 12, quiet)
    monkeypatch.setattr(Trainer, "take_step", take_step)
    train_alone(tmp_path / "broken", config, 12, quiet)
    assert logged_steps(tmp_path / "broken") == logged_steps(tmp_path / "whole")
    whole, broken = saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "broken")
    assert all(torch.equal(w, broken[name]) for name, w in whole.items())


def test_a_line_that_a_kill_tore_is_not_glued_to_the_next(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    train_alone(tmp_path / "t", config, 4, quiet)
    with open(tmp_path / "t" / alone.LOG, "a") as f:
        f.write('{"step": 4, "time"')
    train_alone(tmp_path / "t", config, 8, quiet)
    assert logged_steps(tmp_path / "t") == [2, 4, 4, 6, 8, 8]


@pytest.mark.parametrize(("now", "expected"), [("cpu", 2), ("another card", 4)])
def test_a_resumed_run_takes_as_many_rows_at_once_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str, expected: int
) -> None:
    """Though more would fit now: sums of other rows round otherwise."""
    config = tiny_config(write_corpus(tmp_path))
    config = replace(config, train=replace(config.train, micro_batch_rows=0))
    free = footprint(config, "cpu", 2).total / USABLE["cpu"]
    monkeypatch.setattr(micro_batch, "available_bytes", lambda _: free)
    train_alone(tmp_path / "t", config, 4, quiet)
    monkeypatch.undo()
    monkeypatch.setattr(alone, "device_name", lambda _: now)
    train_alone(tmp_path / "t", config, 8, quiet)
    log = logged(tmp_path / "t")
    found = [record["rows_at_once"] for record in log if "held_out_ce" in record]
    assert found == [2, expected]


def test_another_configuration_is_refused_with_what_was_and_what_is(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    tail = replace(config, optim=replace(config.optim, tail_from_step=20))
    train_alone(tmp_path / "t", tail, 4, quiet)
    source = replace(config.data.sources[0], has_spans=False)
    sources = replace(config, data=replace(config.data, sources=(source,)))
    rates = replace(config, optim=replace(config.optim, peak_lr=((0, 1e-2), (30, 1e-3))))
    for other, message in (
        (replace(tail, seed=5), r"\(seed = 0 there, 5 now\)"),
        (config, r"\(optim\.tail_from_step = 20 there, unset now\)"),
        (sources, r"data\.sources\.0\.has_spans = true there, false now"),
        (rates, r"peak_lr = \[\[0, 0\.01\]\] there, \[\[0, 0\.01\], \[30, 0\.001\]\] now"),
    ):
        with pytest.raises(UserError, match=message):
            train_alone(tmp_path / "t", other, 8, quiet)


def test_a_first_start_that_was_refused_leaves_the_folder_free(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    half = replace(config, train=replace(config.train, precision="fp16"))
    with pytest.raises(UserError, match="set auto, fp32 or bf16"):
        train_alone(tmp_path / "t", half, 4, quiet, torch.device("cpu"))
    train_alone(tmp_path / "t", config, 4, quiet)
    train_alone(tmp_path / "plain", config, 4, quiet)
    found, plain = saved_weights(tmp_path / "t"), saved_weights(tmp_path / "plain")
    assert all(torch.equal(w, found[name]) for name, w in plain.items())
    assert (tmp_path / "t" / "config.toml").read_text() == (
        tmp_path / "plain" / "config.toml"
    ).read_text()


def test_a_start_that_has_no_step_to_take_does_not_say_that_it_saved(tmp_path: Path) -> None:
    config, said = tiny_config(write_corpus(tmp_path)), []
    train_alone(tmp_path / "t", config, 0, said.append)
    assert load_training_state(tmp_path / "t") is None
    train_alone(tmp_path / "t", config, 4, quiet)
    train_alone(tmp_path / "t", config, 3, said.append)
    assert [line for line in said if "train:" in line] == [
        "train: no step to take, the run is at step 0 and was to get to 0",
        "train: no step to take, the run is at step 4 and was to get to 3",
    ]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl/t"])
def test_a_file_is_no_folder_to_train_in(tmp_path: Path, name: str) -> None:
    config = tiny_config(write_corpus(tmp_path))
    with pytest.raises(UserError, match=r"corpus\.jsonl is a file: give the path of a folder"):
        train_alone(tmp_path / name, config, 4, quiet)


def test_two_do_not_train_in_one_folder(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    said = []

    def begin_again(line: str) -> None:
        if not said:
            said.append(line)
            with pytest.raises(UserError, match="another process trains in"):
                train_alone(tmp_path / "run", config, 8, quiet)

    train_alone(tmp_path / "run", config, 4, begin_again)
    assert said
    train_alone(tmp_path / "run", config, 8, quiet)  # who has ended is in nobody's way


def test_a_machine_with_less_memory_may_go_on(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    said: list[str] = []
    train_alone(tmp_path / "run", config, 2, said.append)
    how = {"micro_batch_rows": 1, "activation_budget": 0.5, "compile": "off"}
    train_alone(
        tmp_path / "run", replace(config, train=replace(config.train, **how)), 3, said.append
    )
    assert "resumed at step 2" in said
    other = replace(config, train=replace(config.train, precision="bf16"))
    with pytest.raises(UserError, match="another configuration"):
        train_alone(tmp_path / "run", other, 4, said.append)


def test_a_configuration_that_is_not_of_a_run_is_not_written_over(tmp_path: Path) -> None:
    own = write_config(tmp_path, tiny_config(write_corpus(tmp_path))).rename(
        tmp_path / "config.toml"
    )
    before = own.read_text()
    with pytest.raises(UserError, match=r"holds a config\.toml but no run"):
        train_alone(tmp_path, tiny_config(tmp_path / "corpus.jsonl"), 4, quiet)
    assert own.read_text() == before


def test_a_fleets_folder_is_not_trained_in(tmp_path: Path) -> None:
    open_store(str(tmp_path / "run"), create=True)
    with pytest.raises(UserError, match="holds the run of a fleet: give another folder"):
        train_alone(tmp_path / "run", tiny_config(write_corpus(tmp_path)), 4, quiet)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    train_alone(tmp_path / "t", tiny_config(corpus), 4, quiet)
    corpus.write_text('{"text": "something else entirely"}\n' * 500)
    with pytest.raises(UserError, match="must be the same on every machine"):
        train_alone(tmp_path / "t", tiny_config(corpus), 8, quiet)


def test_a_folder_without_a_state_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="no saved state"):
        load(str(tmp_path))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    train_alone(folder / "t", tiny_config(write_corpus(folder)), 8, quiet)
    return str(folder / "t")


def test_a_train_folder_writes_and_fills_gaps(trained: str) -> None:
    model = load(trained)
    text = model.generate(["the quick"], 12, seed=3)[0]
    assert text.startswith("the quick")
    assert text == load(trained).generate(["the quick"], 12, seed=3)[0]
    filled = model.infill("the [MASK*5] dog[MASK*3]", seed=1)
    assert filled.startswith("the ")
    assert " dog" in filled
    assert "MASK" not in filled


def test_weights_may_write_in_half_precision(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(trained).denoiser.embedding.weight.dtype == torch.float32
    half = load(trained, dtype=torch.bfloat16)
    assert {w.dtype for w in half.denoiser.parameters()} == {torch.bfloat16}
    asked = ["generate", trained, "--prompt", "the quick", "--num-tokens", "12", "--seed", "3"]
    assert main([*asked, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.strip() == half.generate(["the quick"], 12, seed=3)[0].strip()


def test_who_cannot_compile_is_told_so(
    trained: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for asked in (["generate", trained], ["infill", trained, "--text", "the [MASK*5] dog"]):
        assert main([*asked, "--compile"]) == 2
        assert "no C++ compiler on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("no gap here", r"write \[MASK\*12\]"), ("a [MASK*0] b", "at least 1")]
)
def test_a_text_without_a_real_gap_is_refused(trained: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(trained).infill(text)


@pytest.mark.parametrize(("prompt", "num_tokens"), [("the " * 200, 5), ("the", 200), ("the", 0)])
def test_what_does_not_fit_the_context_is_refused(
    trained: str, prompt: str, num_tokens: int
) -> None:
    with pytest.raises(UserError):
        load(trained).generate([prompt], num_tokens)


def test_samples_of_a_prompt_are_told_with_ids_and_confidences(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", trained, "--prompt", "the quick", "--num-tokens", "10", "--seed", "3"]
    assert main([*words, "--num-samples", "2", "--json", "--min-tokens", "10"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(t["prompt"], t["seed"]) for t in told] == [("the quick", 3), ("the quick", 4)]
    assert all(len(t["ids"]) == len(t["confidences"]) == 10 for t in told)
    assert all(0 <= p <= 1 for t in told for p in t["confidences"])
    model = load(trained)
    assert [t["text"] for t in told] == [
        written.text
        for s in (3, 4)
        for written in model.write(["the quick"], 10, min_tokens=10, seed=s)
    ]
    assert main([*words, "--show-confidence", "--suffix", " dog"]) == 0
    text, percents = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text.startswith("the quick")
    assert text.endswith(" dog")
    assert percents.count("%") >= 10


def test_many_prompts_of_different_lengths_are_written_as_each_alone(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(batches.CALL_POSITIONS, "cpu", 0)
    model = load(trained)
    prompts = ["the " * n for n in (1, 5, 2, 4, 1)]
    found = model.write(prompts, 6, seed=5)
    alone = [model.write([prompt], 6, seed=5 + i)[0] for i, prompt in enumerate(prompts)]
    assert [text.ids for text in found] == [text.ids for text in alone]
    assert [text.text for text in found] == [text.text for text in alone]


def test_many_samples_of_a_gap_are_written_in_batches_as_each_alone(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = load(trained), "the[MASK*4] dog"
    monkeypatch.setattr(batches, "MAX_LOGITS", 40 * model.specials.vocab_size)
    sizes: list[int] = []
    fill = model.fill
    monkeypatch.setattr(
        model, "fill", lambda canvas, **how: sizes.append(len(canvas.ids)) or fill(canvas, **how)
    )
    found = model.write_gaps(text, num_samples=8, seed=5)
    assert sum(sizes) == 8
    assert len(sizes) > 1
    assert [t.ids for t in found] == [model.write_gaps(text, seed=5 + i)[0].ids for i in range(8)]


def test_passes_are_kept_for_those_who_look_at_them(trained: str) -> None:
    model = load(trained)
    canvas = model.gaps("the[MASK*4] dog")
    assert model.fill(canvas).trajectory == []
    assert len(model.fill(canvas, keep_trajectory=True).trajectory) > 1


def test_a_stop_text_ends_the_text_before_it(trained: str) -> None:
    model = load(trained)
    (whole,) = model.write(["the quick"], 20, seed=3, min_tokens=20)
    stop = whole.text[-1]
    (cut,) = model.write(["the quick"], 20, seed=3, min_tokens=20, stop=[stop])
    assert whole.text.startswith(cut.text)
    assert stop not in cut.text.removeprefix("the quick")
    assert cut.ids == whole.ids[: len(cut.ids)]


def test_a_decode_preset_is_taken_whole(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(trained)
    blocks = replace(load_preset("decode-small").decode, block_length=4)
    (text,) = model.write(["the"], 12, decode=blocks, min_tokens=12)
    assert text.num_passes > 20, "each of three blocks has its passes"
    words = ["generate", trained, "--prompt", "the", "--num-tokens", "12", "--min-tokens", "12"]
    assert main([*words, "--json", "--decode", "decode-blocks"]) == 0
    (text,) = model.write(["the"], 12, decode=load_preset("decode-blocks").decode, min_tokens=12)
    assert json.loads(capsys.readouterr().out)["ids"] == text.ids


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"stop": [""]}, "would end every text"),
        ({"min_tokens": 9}, "must lie within the 8"),
        ({"num_samples": 0}, "at least 1"),
        ({"suffix": " dog", "stop": ["."]}, "has no end of its own"),
    ],
)
def test_wishes_that_cannot_be_are_refused(
    trained: str, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(trained).write(["the"], 8, **wishes)


def test_what_is_no_list_of_sound_texts_is_refused(trained: str) -> None:
    model = load(trained)
    for prompts, wishes in (("the", {}), (["the"], {"stop": "qu"})):
        with pytest.raises(UserError, match="is one text: give a list"):
            model.write(prompts, 8, **wishes)
    for ask in (
        lambda bad: model.write([bad], 8),
        lambda bad: model.write(["the"], 8, suffix=bad),
        lambda bad: model.infill(f"{bad}[MASK*2]"),
    ):
        with pytest.raises(UserError, match="not UTF-8"):
            ask("a\udcff")
    with pytest.raises(UserError, match="num_tokens is -5"):
        model.write(["the"], -5)
    for ask in (lambda: model.write(["the"], 10**12), lambda: model.infill(f"a[MASK*{10**12}]")):
        with pytest.raises(UserError, match="the context holds 32"):
            ask()


def test_the_log_holds_losses_and_probes(trained: str) -> None:
    log = logged(Path(trained))
    assert any("loss" in record for record in log)
    intervals = [record for record in log if "held_out_ce" in record]
    assert [record["step"] for record in intervals] == [4, 8]
    for record in intervals:
        assert 0.0 < record["masked_share"] < 1.0
        assert 0.0 < record["prefix_share"] < 1.0
        assert any(ce for ce in record["ce_by_t"].values())


def test_the_log_says_what_an_interval_s_rows_held(tmp_path: Path) -> None:
    train_alone(tmp_path / "t", mixed_config(tmp_path), 12, quiet)
    log = logged(tmp_path / "t")
    first, _, last = [record for record in log if "held_out_ce" in record]
    assert set(first["tokens"]) == {"web"}
    assert set(last["tokens"]) == set(last["documents"]) == {"web", "facts"}
    assert sum(last["tokens"].values()) == pytest.approx(1.0)
    assert last["epochs"]["web"] == 0
    assert first["span_row_share"] == 0.0
    assert last["span_row_share"] > 0.0
    for name in ("padding_share", "documents_cut_share", "head_share", "short_share"):
        assert 0.0 <= last[name] <= 1.0


def test_a_loss_that_is_no_number_stops_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(write_corpus(tmp_path))
    train_alone(tmp_path / "t", config, 4, quiet)
    saved = saved_weights(tmp_path / "t")
    take_step = Trainer.take_step

    def spoilt(self: Trainer):
        if self.step == 5:  # after a good step of the interval, weights are spoilt
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
        return take_step(self)

    monkeypatch.setattr(Trainer, "take_step", spoilt)
    with pytest.raises(UserError, match=r"not finite at step 6, on rows from \{'cursor'"):
        train_alone(tmp_path / "t", config, 8, quiet)
    after = saved_weights(tmp_path / "t")
    assert all(torch.equal(w, after[name]) for name, w in saved.items())
    log = logged(tmp_path / "t")
    assert log[-1]["nonfinite_step"] == 6
    assert log[-1]["held_out_ce"] is None


def test_the_log_says_how_long_a_step_waits_for_data(tmp_path: Path) -> None:
    train_alone(tmp_path / "t", tiny_config(write_corpus(tmp_path)), 4, quiet)
    log = logged(tmp_path / "t")
    (interval,) = [record for record in log if "held_out_ce" in record]
    assert 0.0 <= interval["data_wait_share"] < 1.0


def test_the_autoregressive_twin_continues_text_and_fills_no_gap(tmp_path: Path) -> None:
    config = tiny_config(write_corpus(tmp_path))
    config = replace(config, model=replace(config.model, causal=True))
    train_alone(tmp_path / "ar", config, 4, quiet)
    model = load(str(tmp_path / "ar"))
    prompts = ["the quick", "a"]
    texts = model.generate(prompts, 8, seed=3, views=Views(terminal=True))
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    assert model.generate(prompts[1:], 8, seed=4) == texts[1:]  # row 1 had seed 3 + 1
    greedy = load_preset("decode-left-to-right").decode
    assert model.generate(prompts, 8, decode=greedy) == model.generate(
        prompts, 8, decode=greedy, seed=9
    )
    with pytest.raises(UserError, match="cannot draft or refill"):
        model.generate(prompts, 8, decode=config.decode)
    with pytest.raises(UserError, match="only continues text"):
        model.infill("the [MASK*2] fox")
    with pytest.raises(UserError, match="only continues text"):
        model.generate(prompts, 8, suffix=" fox")
    with pytest.raises(UserError, match="no drafts to stream"):
        model.generate(prompts, 8, streamer=cast(Any, object()))
    with pytest.raises(UserError, match="without compile=True"):
        load(str(tmp_path / "ar"), compile=True)
    (whole,) = model.write(["a"], 8, min_tokens=8)
    (cut,) = model.write(["a"], 8, min_tokens=8, stop=[whole.text[-1]])
    assert len(whole.ids) == whole.num_passes == 8
    assert cut.ids == whole.ids[: cut.num_passes]
    assert whole.text.startswith(cut.text)
