"""Freed memory stays with the process: real page faults of a process of its own."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from dflash_mp.heap import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
c = ctypes.CDLL(None)
PR_SET_THP_DISABLE = 41  # pages of 4 KiB, whatever the system prefers
c.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
c.malloc.restype = ctypes.c_void_p

def fill() -> None:
    blocks = [c.malloc(2**20) for _ in range(100)]
    for block in blocks:
        c.memset(ctypes.c_void_p(block), 1, 2**20)
    for block in blocks:
        c.free(ctypes.c_void_p(block))

for _ in range(5):
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    """Pages that the system handed out for the same blocks again."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_memory_is_not_taken_from_the_system_again():
    """Five times 100 MiB are 128,000 pages."""
    assert faults("given back") > 100_000
    assert faults("kept") < 1_000
