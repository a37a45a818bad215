"""What people do about the race, as context managers that put torch back exactly as it was.

Each one yields a sentence that says what it did, refuses to be applied twice, and refuses a torch
whose names it does not know. ``plans.py`` says where a threaded program enters which.
"""

import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo.config
import torch.fx._symbolic_trace

from dflash_mp.config import UserError

FX = "torch.fx._symbolic_trace"

Said = Iterator[str]


class TreatmentRefused(UserError):
    """The treatment is active already, or does not know this torch."""


def require_names(owner: Any, *names: str) -> None:
    """Refuse a torch in which ``owner`` lacks one of ``names``."""
    for name in names:
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", owner)
            raise TreatmentRefused(
                f"torch {torch.__version__} has no {where}.{name}: this treatment does not know it"
            )


_active: set[Hashable] = set()


@contextmanager
def applied_once(key: Hashable) -> Iterator[None]:
    """Refuse to enter while ``key`` is entered somewhere in this process."""
    if key in _active:
        raise TreatmentRefused(f"{key} is applied already; leave it before entering it again")
    _active.add(key)
    try:
        yield
    finally:
        _active.remove(key)


@contextmanager
def module_shim() -> Said:
    """Stand a module whose flag always reads False in ``sys.modules`` and in ``torch.fx``."""
    real = sys.modules[FX]
    require_names(real, "is_fx_symbolic_tracing")
    if type(real) is not types.ModuleType or torch.fx._symbolic_trace is not real:
        raise TreatmentRefused(f"{FX} is not the module that torch installed")

    class Shim(types.ModuleType):
        @property
        def _is_fx_tracing_flag(self) -> bool:
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    with applied_once("module_shim"):
        shim = Shim(FX)
        sys.modules[FX] = shim
        torch.fx._symbolic_trace = shim
        try:
            yield f"sys.modules[{FX!r}] is a stand-in whose flag reads False"
        finally:
            sys.modules[FX] = real
            torch.fx._symbolic_trace = real


def _never_tracing() -> bool:
    return False


@contextmanager
def replaced_function() -> Said:
    """Point the module attribute ``is_fx_symbolic_tracing`` to a function that says False."""
    module = torch.fx._symbolic_trace
    require_names(module, "is_fx_symbolic_tracing")
    with applied_once("replaced_function"):
        found = module.is_fx_symbolic_tracing
        module.is_fx_symbolic_tracing = _never_tracing
        try:
            yield f"{FX}.is_fx_symbolic_tracing is another function, which returns False"
        finally:
            module.is_fx_symbolic_tracing = found


@contextmanager
def swapped_code() -> Said:
    """Make the function object that everybody holds run code which says False."""
    module = torch.fx._symbolic_trace
    require_names(module, "is_fx_symbolic_tracing")
    function = module.is_fx_symbolic_tracing
    with applied_once("swapped_code"):
        found = function.__code__
        function.__code__ = _never_tracing.__code__
        try:
            yield "the function object is_fx_symbolic_tracing runs code which returns False"
        finally:
            function.__code__ = found


def config_is_per_thread() -> bool:
    """Whether a value set in ``torch._dynamo.config`` is seen by the setting thread only."""
    config: Any = torch._dynamo.config
    return hasattr(config._config["error_on_nested_fx_trace"].user_override, "set")


_config_lock = threading.Lock()
_config_users: dict[str, tuple[int, Any]] = {}


@contextmanager
def dynamo_config(name: str, value: bool) -> Said:
    """Set one key of ``torch._dynamo.config`` for the calling thread, or for the whole process.

    Where the configuration is process-wide and several threads enter, the last to leave restores
    what the first one found.
    """
    config: Any = torch._dynamo.config
    require_names(config, name)
    with applied_once((name, threading.get_ident())):
        if config_is_per_thread():
            with config.patch(**{name: value}):
                yield f"torch._dynamo.config.{name}={value} in this thread only"
            return
        with _config_lock:
            users, found = _config_users.get(name, (0, getattr(config, name)))
            _config_users[name] = users + 1, found
            setattr(config, name, value)
        try:
            yield f"torch._dynamo.config.{name}={value} in the whole process"
        finally:
            with _config_lock:
                users, found = _config_users.pop(name)
                if users > 1:
                    _config_users[name] = users - 1, found
                else:
                    setattr(config, name, found)


OnWait = Callable[[], None]
Section = Callable[[Hashable, OnWait], AbstractContextManager[None]]


def no_section(signature: Hashable, on_wait: OnWait) -> AbstractContextManager[None]:
    """Run at once."""
    return nullcontext()


def execution_lock() -> Section:
    """One lock around everything that compiles, calls compiled code or runs its backward."""
    lock = threading.RLock()

    @contextmanager
    def section(signature: Hashable, on_wait: OnWait) -> Iterator[None]:
        if not lock.acquire(blocking=False):
            on_wait()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    return section


def first_call_gate() -> Section:
    """Let the first call of a new signature run alone and calls of seen signatures together.

    A section inside another belongs to the outer one.
    """
    condition = threading.Condition()
    seen: set[Hashable] = set()
    inside = threading.local()
    running = {"shared": 0, "alone": 0}

    def enter(alone: bool, on_wait: OnWait) -> None:
        def free() -> bool:
            return running["alone"] == 0 and (not alone or running["shared"] == 0)

        with condition:
            if not free():
                on_wait()
                condition.wait_for(free)
            running["alone" if alone else "shared"] += 1

    @contextmanager
    def section(signature: Hashable, on_wait: OnWait) -> Iterator[None]:
        if getattr(inside, "yes", False):
            yield
            return
        alone = signature not in seen
        enter(alone, on_wait)
        inside.yes = True
        try:
            yield
            seen.add(signature)
        finally:
            inside.yes = False
            with condition:
                running["alone" if alone else "shared"] -= 1
                condition.notify_all()

    return section
