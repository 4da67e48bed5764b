"""What every room shares about the machine."""

import platform
import subprocess
import sys

import pytest

from diffurefill.config import UserError
from diffurefill.runtime import set_threads

COUNT_PAGES = """
import resource
import torch
from diffurefill.runtime import set_threads

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

set_threads(1)
for _ in range(5):
    before = pages()
    held = [torch.ones(4 << 20) for _ in range(8)]
    del held
    print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator is another")
def test_memory_that_is_freed_is_not_asked_for_again():
    command = [sys.executable, "-c", COUNT_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = map(int, done.stdout.split())
    of_a_round = 8 * 4 * (4 << 20) // 4096
    assert last < 0.01 * of_a_round < first


@pytest.mark.parametrize("num_threads", [0, -1])
def test_there_is_at_least_one_thread(num_threads: int):
    with pytest.raises(UserError, match="--threads must be at least 1"):
        set_threads(num_threads)
