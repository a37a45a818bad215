"""Run commands one after the other: ``python many_commands.py`` reads their words as JSON.

Each is a list of the exit code that it should have, the module and its arguments, and runs in a
fork of an interpreter that has loaded the libraries already; so do the ranks of ``launch.spawn``.
Ends with 1 if any has another exit code, and prints what those have said.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time

import matplotlib.pyplot  # noqa: F401
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401

# What most of the commands would spend their time on.
import dflash_mp.rank
import dflash_mp.train  # noqa: F401
from dflash_mp.acceptance import evaluate_prompts  # noqa: F401
from dflash_mp.data.corpus import prepare  # noqa: F401
from dflash_mp.export_folder import write_export  # noqa: F401
from dflash_mp.plan.plan import make_plan  # noqa: F401
from dflash_mp.target.model import load_target  # noqa: F401


def run(words: list[str]) -> int:
    """The exit code of a module in a fork; all output goes to the standard streams."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        if words[0] == "launch.spawn":
            forks = multiprocessing.get_context("fork")
            multiprocessing.get_context = lambda _: forks
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    failed = False
    report = os.fdopen(os.dup(1), "w")
    for expected, *words in json.load(sys.stdin):
        with tempfile.TemporaryFile() as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            begun = time.perf_counter()
            code = run(words)
            took = time.perf_counter() - begun
            output.seek(0)
            said = output.read().decode() if code != expected else ""
        failed |= code != expected
        report.write(f"{code} {took:.1f} s {words}\n{said}")
        report.flush()
    sys.exit(failed)


if __name__ == "__main__":
    main()
