"""Where a program with one drafter per thread enters each treatment.

Read ``TREATMENTS`` as the list of columns of the diagnostic's table.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from dflash_mp.diagnostics.backport import thread_local_flag, thread_local_flag_and_hooks
from dflash_mp.diagnostics.treatments import (
    Section,
    dynamo_config,
    execution_lock,
    first_call_gate,
    module_shim,
    no_section,
    replaced_function,
    swapped_code,
)


def _nothing() -> AbstractContextManager[str]:
    return nullcontext("")


@dataclass(frozen=True)
class Treatment:
    """Where a program with one drafter per thread enters a treatment."""

    about: str
    # In the main thread, before the first torch.compile().
    before_compile: Callable[[], AbstractContextManager[str]] = _nothing
    # In the main thread, after torch.compile() wrapped everything and before threads start.
    after_compile: Callable[[], AbstractContextManager[str]] = _nothing
    # In each worker thread, around all its work.
    in_worker: Callable[[], AbstractContextManager[str]] = _nothing
    # Makes what goes around each piece of work that compiles or runs compiled code.
    make_section: Callable[[], Section] = lambda: no_section
    # Which signatures run once in the main thread before threads start: "", "all", or
    # "all but one".
    warm_up: str = ""
    # One process per actor in place of one thread.
    processes: bool = False


def _allow_nested() -> AbstractContextManager[str]:
    return dynamo_config("error_on_nested_fx_trace", False)


def _force_compile() -> AbstractContextManager[str]:
    return dynamo_config("force_compile_during_fx_trace", True)


TREATMENTS = {
    "none": Treatment("nothing"),
    "shim": Treatment("a stand-in module in sys.modules", before_compile=module_shim),
    "patch-before": Treatment(
        "replace the function before torch.compile()", before_compile=replaced_function
    ),
    "patch-after": Treatment(
        "replace the function after torch.compile()", after_compile=replaced_function
    ),
    "code-swap": Treatment("replace the function's code object", after_compile=swapped_code),
    "backport": Treatment("thread-local flag, as upstream", before_compile=thread_local_flag),
    "backport-hooks": Treatment(
        "thread-local flag and module hooks", before_compile=thread_local_flag_and_hooks
    ),
    "lock": Treatment("one lock around all of it", make_section=execution_lock),
    "gate": Treatment("first call of a signature alone", make_section=first_call_gate),
    "warm": Treatment("warm-up of every signature", warm_up="all"),
    "warm-partial": Treatment("warm-up of all signatures but one", warm_up="all but one"),
    "nested-main": Treatment(
        "error_on_nested_fx_trace=False in main", before_compile=_allow_nested
    ),
    "nested-worker": Treatment(
        "error_on_nested_fx_trace=False in each thread", in_worker=_allow_nested
    ),
    "force-main": Treatment(
        "force_compile_during_fx_trace=True in main", before_compile=_force_compile
    ),
    "force-worker": Treatment(
        "force_compile_during_fx_trace=True in each thread", in_worker=_force_compile
    ),
    "processes": Treatment("one process each", processes=True),
}
