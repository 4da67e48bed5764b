import subprocess
import sys

import pytest

from diffurefill.config import UserError
from diffurefill.data.tokens.bpe import train_bpe

CODE = "def add(self, x):\n    if x > 0:\n        return self.total + x\n\n\nclass Sum:\n" * 20


def test_words_keep_their_space_and_lines_their_indentation() -> None:
    backend = train_bpe([CODE], 420)
    assert backend.encode("\n    return self.total").tokens == [
        *("\n    ", "return", " self", ".", "total")
    ]


def test_training_again_in_another_process_gives_the_same_tokenizer() -> None:
    # 40 characters tie in frequency for the last places of an alphabet of 37.
    text = "".join(chr(0x4E00 + n) for n in range(40))
    code = (
        "import hashlib, sys; from diffurefill.data.tokens.bpe import train_bpe\n"
        "made = train_bpe([sys.argv[1]], 300).to_str()\n"
        "print(hashlib.sha256(made.encode()).hexdigest())"
    )
    command = [sys.executable, "-c", code, text]
    outputs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(outputs) == 1


def test_the_ids_of_a_trained_tokenizer_stay_what_they_are() -> None:
    # Runs keep their tokenizer with them, but their recorded figures hang on these ids.
    backend = train_bpe([CODE], 420)
    assert backend.encode("    return x\n\u00e9").ids == [
        *(284, 259, 259, 319, 286, 258),
        *(2 + 0xC3, 2 + 0xA9),
    ]


def test_the_vocabulary_is_no_larger_than_asked() -> None:
    for num_pieces in (300, 333, 350):
        assert train_bpe([CODE], num_pieces).get_vocab_size() <= num_pieces


@pytest.mark.parametrize("texts", [[], [""]])
def test_training_on_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"add text to data\.sources"):
        train_bpe(texts, 1024)


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="use at least 300"):
        train_bpe([CODE], 258)
