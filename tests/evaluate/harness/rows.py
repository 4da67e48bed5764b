"""A few made-up rows of every benchmark, in the fields of its real file."""

from __future__ import annotations

import json
from pathlib import Path

from diffurefill.evaluate.harness.tasks import BENCHMARKS

CHOICES = {"text": ["a fox", "a lazy dog", "seven birds", "old songs"], "label": list("ABCD")}


def rows_of(name: str, count: int) -> list[dict]:
    return [_row(name, i) for i in range(count)]


def _row(name: str, i: int) -> dict:
    if name == "hellaswag":
        endings = ["jumps over.", "sing [step] old songs.", "while small birds.", "the brown."]
        context = {"activity_label": "Jumping", "ctx_a": f"The fox {i}.", "ctx_b": "it"}
        return {**context, "label": str(i % 4), "endings": endings}
    if name in ("arc_easy", "arc_challenge"):
        return {"question": f"Who jumps, {i}?", "choices": CHOICES, "answerKey": "ABCD"[i % 4]}
    if name == "openbookqa":
        return {"question_stem": f"What sings, {i}?", "choices": CHOICES, "answerKey": "C"}
    if name == "piqa":
        return {"goal": f"Jump over {i}", "sol1": "with a fox", "sol2": "slowly", "label": i % 2}
    if name == "winogrande":
        return {
            "sentence": f"The fox saw the dog {i} so _ jumped over.", "option1": "the fox",
            "option2": "the dog", "answer": "12"[i % 2],
        }  # fmt: skip
    if name == "sciq":
        wrong = {f"distractor{k}": f"bird {k}" for k in (1, 2, 3)}
        return {
            "question": f"Who {i}?",
            "correct_answer": "fox",
            "support": " Foxes jump.",
            **wrong,
        }
    if name == "lambada_openai":
        return {"text": f"the quick brown fox jumps over {i} lazy dog"}
    subject = ("anatomy", "us_foreign_policy")[i % 2]
    return {"question": f"Which, {i}?", "subject": subject, "choices": CHOICES["text"], "answer": 2}


def write_rows(folder: Path, count: int = 6) -> Path:
    for name, benchmark in BENCHMARKS.items():
        lines = [json.dumps(row) for row in rows_of(name, count)]
        (folder / benchmark.file).write_text("\n".join(lines) + "\n", "utf-8")
    return folder
