"""How the race works in the installed torch, found by looking at its source."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.convert_frame
import torch._dynamo.eval_frame
import torch._higher_order_ops.utils
import torch.fx._symbolic_trace
import torch.fx.traceback
import torch.nn.attention.flex_attention

from dflash_mp.diagnostics.treatments import config_is_per_thread


@dataclass(frozen=True)
class Features:
    """What decides how threads and compiled functions get along."""

    flag_per_thread: bool
    # Whether a compile in one thread makes torch.compiler.is_compiling() True in all of them.
    compile_marks_process: bool
    config_per_thread: bool
    # Whether create_block_mask writes fx.traceback.current_meta, a process-wide dictionary.
    block_mask_annotates: bool


def features() -> Features:
    """Look at the installed torch."""
    return Features(
        flag_per_thread=hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_tls"),
        compile_marks_process="_compile_session_context"
        in inspect.getsource(torch._dynamo.convert_frame)
        and "_is_compiling_flag" in vars(torch.compiler),
        config_per_thread=config_is_per_thread(),
        block_mask_annotates="annotate"
        in inspect.getsource(torch.nn.attention.flex_attention._dense_to_ordered),
    )


def find_line(owner: Any, pattern: str) -> str:
    """Return ``file:line  text`` of the first source line of ``owner`` that matches."""
    # The first compile of a process wraps some of torch's functions, Tracer.trace among them.
    owner = inspect.unwrap(owner)
    lines, first = inspect.getsourcelines(owner)
    file = Path(inspect.getsourcefile(owner) or "")
    # A module's lines are numbered from 0, a function's from its first line.
    first = max(first, 1)
    for number, line in enumerate(lines, start=first):
        if re.search(pattern, line):
            root = Path(torch.__file__).parent.parent
            return f"{file.relative_to(root)}:{number}  {line.strip()}"
    return f"{file.name}: no line matches {pattern!r}"


def explanation() -> list[tuple[str, str]]:
    """Five statements, each with the source line of the installed torch that shows it."""
    fx, eval_frame = torch.fx._symbolic_trace, torch._dynamo.eval_frame
    found = features()
    kept = "per thread" if found.flag_per_thread else "once for the whole process"
    masked = (
        "; is_compiling() is True in every thread during any compile, which hides the flag"
        if found.compile_marks_process
        else ""
    )
    return [
        (
            f"The flag that says 'FX is tracing' is kept {kept}.",
            find_line(fx, r"^_is_fx_tracing_(tls|flag)\b"),
        ),
        (
            "Every trace, also the one inside a compile, turns it on and restores it afterwards.",
            find_line(fx.Tracer.trace, r"_is_fx_tracing_flag = True|_set_is_fx_tracing\(True\)"),
        ),
        (
            f"One function reads it{masked}.",
            find_line(fx.is_fx_symbolic_tracing, "return"),
        ),
        (
            "torch.compile() takes a reference to that function when it wraps yours: a later "
            "patch of the module's attribute is not seen.",
            find_line(eval_frame, "is_fx_symbolic_tracing = "),
        ),
        (
            "Every call of a compiled function asks it first, with nothing left to compile too.",
            find_line(eval_frame, r"^ +(if )?is_fx_symbolic_tracing\(\)"),
        ),
    ]
