"""The frame around every ``python -m dflash_mp.<command>``: Hydra in, one readable line out.

A user's mistake ends with one line and exit code 2, no traceback; under torchrun the same line
stands in its report. Any other exception keeps its traceback. ``--help`` prints the docstring of
the command's module.
"""

import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mp.config import UserError, config_dir, explain, to_config
from dflash_mp.config_comments import commented

USER_ERROR = 2
ConfigT = TypeVar("ConfigT")


def rank_zero(value: str, other: str | None = None) -> str | None:
    """Resolver ``${rank_zero:a,b}``: ``a`` on world rank 0, else ``b``."""
    return value if os.environ.get("RANK", "0") == "0" else other


def given(value: str | None, other: str) -> str:
    """Resolver ``${given:a,b}``: ``a``, or ``b`` where that is null."""
    return other if value is None else value


OmegaConf.register_new_resolver("rank_zero", rank_zero, replace=True)
OmegaConf.register_new_resolver("given", given, replace=True)


def run_command(name: str, kind: type[ConfigT], work: Callable[[ConfigT, Path], None]) -> None:
    """Compose ``conf/<name>.yaml`` with the command line and call ``work(config, folder)``.

    Args:
        name: the root configuration.
        kind: its dataclass.
        work: gets the validated configuration and Hydra's output folder of this job.
    """
    asked = set(sys.argv[1:])
    if asked & {"--cfg", "-c", "--help", "-h"} and os.environ.get("RANK", "0") != "0":
        return  # one rank shows what all of them would run
    if asked & {"--help", "-h"}:
        sys.stdout.write(help_text(name, sys.modules[work.__module__]))
        return
    # Hydra would print its own report and swallow the exception otherwise.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @hydra.main(version_base="1.3", config_path=config_dir(), config_name=name)
    def task(raw: DictConfig) -> None:
        try:
            work(to_config(raw, kind), Path(HydraConfig.get().runtime.output_dir))
        except UserError as error:
            # Here, because Hydra would add lines of its own to an exception.
            fail(str(error))

    try:
        with annotated(name) if prints_job(sys.argv[1:]) else nullcontext():
            task()
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        fail(explain(f"{error}\n{cause or ''}", kind))


def prints_job(arguments: list[str]) -> bool:
    """Whether Hydra is asked to print the configuration of the job, and nothing but it."""
    shown = [after for flag, after in pairwise(arguments) if flag in ("--cfg", "-c")]
    return shown == ["job"] and not set(arguments) & {"--package", "-p"}


@contextmanager
def annotated(name: str) -> Iterator[None]:
    """Print what the body prints, YAML, with the comments of ``conf/``."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    choices = HydraConfig.get().runtime.choices
    sys.stdout.write(commented(printed.getvalue(), Path(config_dir()), name, choices))


def help_text(name: str, module: ModuleType) -> str:
    """What ``--help`` prints: the docstring of a command's module, and where its keys are.

    Hydra's own help is the whole configuration, which fits no screen.
    """
    return f"""{inspect.getdoc(module)}

Every key with its comment: {config_dir()}/{name}.yaml and the folders beside it.
--cfg job prints them as a run has them, --multirun sweeps, --hydra-help lists Hydra's own flags.
"""


def fail(message: str) -> NoReturn:
    """Leave with ``message`` as the last line; the ranks say it once."""
    # Every rank finds the same mistake in the same configuration; rank 0 speaks for all. A
    # mistake that only one rank can see was said by that rank inside the job (``say``).
    if message and os.environ.get("RANK", "0") == "0":
        say(message)
    raise SystemExit(USER_ERROR)


def say(message: str) -> None:
    """Print one line for the user, and leave it where torchrun's report looks for it."""
    sys.stderr.write(f"dflash_mp: {message}\n")
    sys.stderr.flush()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": extra}}
        Path(error_file).write_text(json.dumps(report))
