"""The commands of an installed package: ``dflash-mp <command> [key=value ...]``.

The same as ``python -m`` with the module's name. Ranks are started by a launcher, which takes
modules: ``torchrun --nproc_per_node 8 -m dflash_mp.train ...``.
"""

import runpy
import sys

from dflash_mp.command import USER_ERROR

COMMANDS = {
    "train": "dflash_mp.train",
    "evaluate": "dflash_mp.evaluate",
    "export": "dflash_mp.export",
    "plan": "dflash_mp.plan",
    "doctor": "dflash_mp.doctor",
    "data": "dflash_mp.data.report",
    "generate": "dflash_mp.data.generate",
    "race": "dflash_mp.diagnostics.race",
    "report": "dflash_mp.report",
}


def main() -> None:
    """Run the module behind the first argument; the others are for it."""
    _, *given = sys.argv
    usage = f"dflash-mp <{'|'.join(COMMANDS)}> [key=value ...]; each has --help"
    if given and given[0] in ("--help", "-h"):
        sys.stdout.write(f"{usage}\n")
        return
    if not given or given[0] not in COMMANDS:
        wrong = f"{given[0]} is no command" if given else "no command"
        sys.stderr.write(f"dflash_mp: {wrong}: {usage}\n")
        raise SystemExit(USER_ERROR)
    module = COMMANDS[given[0]]
    sys.argv = [module, *given[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
