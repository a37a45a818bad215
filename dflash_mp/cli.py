"""The commands of an installed package: ``dflash-mp <command> [key=value ...]``.

The same as ``python -m`` with the module's name. Ranks are started by a launcher, which takes
modules: ``torchrun --nproc_per_node 8 -m dflash_mp.train ...``.
"""

import os
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
USAGE = f"dflash-mp <{'|'.join(COMMANDS)}> [key=value ...]; each has --help"

QUERY = ["-sc", "query=bash"]
"""How Hydra is asked what can follow the command line in COMP_LINE."""

COMPLETION = f"""\
_dflash_mp() {{
    local words=$(COMP_LINE=$COMP_LINE dflash-mp {" ".join(QUERY)} 2> /dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o nospace -o default -F _dflash_mp dflash-mp
"""


def main() -> None:
    """Run the module behind the first argument; the others are for it."""
    _, *given = sys.argv
    if given == QUERY:
        given = completed(os.environ.get("COMP_LINE", ""))
    if given in (["--help"], ["-h"], ["--completion"]):
        sys.stdout.write(COMPLETION if given == ["--completion"] else f"{USAGE}\n")
        return
    if not given or given[0] not in COMMANDS:
        wrong = f"{given[0]} is no command" if given else "no command"
        sys.stderr.write(f"dflash_mp: {wrong}: {USAGE}\n")
        raise SystemExit(USER_ERROR)
    module = COMMANDS[given[0]]
    sys.argv = [module, *given[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def completed(line: str) -> list[str]:
    """The arguments that make Hydra complete ``line``; prints the commands while one is typed."""
    _, command, *rest = [*line.split(" "), ""]
    if not rest or rest == [""]:
        sys.stdout.write(" ".join(COMMANDS) + "\n")
        raise SystemExit
    # Hydra takes everything behind the first word for overrides.
    os.environ["COMP_LINE"] = " ".join(["dflash-mp", *rest[:-1]])
    return [command, *QUERY]
