"""The upstream fix for torches that keep the FX flag in one global, and a step beyond it.

``thread_local_flag`` makes the flag thread-local (pytorch pull request 168999, in 2.14).
``thread_local_hooks`` does the same to the hooks that a trace puts on ``nn.Module``, which are
process-wide in every torch up to and including 2.14.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._higher_order_ops.utils
import torch.fx._symbolic_trace

from dflash_mp.diagnostics.treatments import Said, TreatmentRefused, applied_once, require_names

if TYPE_CHECKING:
    from torch.fx._symbolic_trace import is_fx_tracing_warning

# The replaced code runs with the globals of torch.fx._symbolic_trace, where this name is put.
_race_tracing = threading.local()


def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()
    return getattr(_race_tracing, "flag", False)


def _is_fx_symbolic_tracing() -> bool:
    return getattr(_race_tracing, "flag", False) and not torch.compiler.is_compiling()


@contextmanager
def _flag_as(value: bool) -> Iterator[None]:
    found = getattr(_race_tracing, "flag", False)
    _race_tracing.flag = value
    try:
        yield
    finally:
        _race_tracing.flag = found


def _trace_with_own_flag(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _flag_as(True):
            return trace(*args, **kwargs)

    return wrapped


def _env_with_own_flag(env: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(env)
    @contextmanager
    def wrapped() -> Iterator[None]:
        with _flag_as(False), env():
            yield

    return wrapped


@contextmanager
def thread_local_flag() -> Said:
    """Make the FX tracing flag thread-local, whether or not functions are compiled already.

    The functions that read the flag keep their identity and get other code, so that the reference
    which a compiled function captured follows. The global itself is still written, by nobody
    read, and put back at the end.
    """
    fx: Any = torch.fx._symbolic_trace
    utils: Any = torch._higher_order_ops.utils
    if hasattr(fx, "_is_fx_tracing_tls"):
        with applied_once("thread_local_flag"):
            yield f"nothing: torch {torch.__version__} keeps the flag per thread"
        return
    require_names(
        fx,
        "_is_fx_tracing_flag",
        "is_fx_tracing",
        "is_fx_symbolic_tracing",
        "is_fx_tracing_warning",
    )
    require_names(utils, "_set_compilation_env")
    if fx._is_fx_tracing_flag:
        raise TreatmentRefused("a trace is running or the FX tracing flag is stuck: start earlier")
    with applied_once("thread_local_flag"):
        readers = {
            fx.is_fx_tracing: _is_fx_tracing.__code__,
            fx.is_fx_symbolic_tracing: _is_fx_symbolic_tracing.__code__,
        }
        codes = {reader: reader.__code__ for reader in readers}
        trace, env = fx.Tracer.trace, utils._set_compilation_env
        own_env = _env_with_own_flag(env)
        # Modules that imported the environment by name hold a reference of their own.
        env_users = [m for m in sys.modules.values() if _attribute(m, env.__name__) is env]

        fx._race_tracing = _race_tracing
        for reader, code in readers.items():
            reader.__code__ = code
        fx.Tracer.trace = _trace_with_own_flag(trace)
        for module in env_users:
            setattr(module, env.__name__, own_env)
        try:
            yield (
                "the FX tracing flag is thread-local for its readers, Tracer.trace and the "
                "environment of higher-order operators"
            )
        finally:
            for module in env_users:
                setattr(module, env.__name__, env)
            fx.Tracer.trace = trace
            for reader, code in codes.items():
                reader.__code__ = code
            del fx._race_tracing
            fx._is_fx_tracing_flag = False


def _attribute(module: Any, name: str) -> Any:
    # Some modules build attributes on demand; look only at what is there.
    return getattr(module, "__dict__", {}).get(name)


class _ThreadHooks(threading.local):
    """The calling thread's patchers and, by method name, its hooks on ``nn.Module``."""

    def __init__(self) -> None:
        self.patchers: list[Any] = []
        self.methods: dict[str, list[Callable[..., Any]]] = {"__call__": [], "__getattr__": []}


class _Dispatchers:
    """Stand on ``nn.Module`` while any thread traces; each call goes to its own thread's hook."""

    def __init__(self) -> None:
        self.hooks = _ThreadHooks()
        self._lock = threading.Lock()
        self._users = {"__call__": 0, "__getattr__": 0}
        self._found = {name: vars(torch.nn.Module)[name] for name in self._users}

    def push(self, name: str, hook: Callable[..., Any]) -> None:
        self.hooks.methods[name].append(hook)
        with self._lock:
            self._users[name] += 1
            if self._users[name] == 1:
                setattr(torch.nn.Module, name, self._dispatcher(name))

    def remove(self, name: str, hook: Callable[..., Any]) -> None:
        self.hooks.methods[name].remove(hook)
        with self._lock:
            self._users[name] -= 1
            if self._users[name] == 0:
                setattr(torch.nn.Module, name, self._found[name])

    def _dispatcher(self, name: str) -> Callable[..., Any]:
        found = self._found[name]

        @functools.wraps(found)
        def dispatch(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            hooks = self.hooks.methods[name]
            return (hooks[-1] if hooks else found)(module, *args, **kwargs)

        return dispatch


class _ThreadPatch:
    """Takes the place of ``_PatchedFnSetAttr`` for the two methods of ``nn.Module``."""

    def __init__(self, dispatchers: _Dispatchers, name: str, hook: Callable[..., Any]) -> None:
        self._dispatchers, self._name, self._hook = dispatchers, name, hook

    def patch(self) -> None:
        self._dispatchers.push(self._name, self._hook)

    def revert(self) -> None:
        self._dispatchers.remove(self._name, self._hook)


@contextmanager
def thread_local_hooks() -> Said:
    """Let each thread see only its own trace's hooks on ``nn.Module``.

    Functions registered with ``torch.fx.wrap`` are still replaced for the whole process.
    """
    fx: Any = torch.fx._symbolic_trace
    require_names(fx, "_Patcher", "_new_patcher", "_maybe_revert_all_patches", "CURRENT_PATCHER")
    require_names(fx._Patcher, "patch_method", "revert_all_patches", "reapply_all_patches")
    if fx.CURRENT_PATCHER is not None or torch.nn.Module.__call__ is not fx._orig_module_call:
        raise TreatmentRefused("a trace is running or its hooks were left behind: start earlier")
    dispatchers = _Dispatchers()
    patch_method = fx._Patcher.patch_method

    def own_patch_method(
        patcher: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True
    ) -> None:
        if cls is not torch.nn.Module or name not in dispatchers.hooks.methods:
            patch_method(patcher, cls, name, new_fn, deduplicate)
            return
        patcher.patches_made.append(_ThreadPatch(dispatchers, name, new_fn))
        patcher.patches_made[-1].patch()

    @contextmanager
    def own_new_patcher() -> Iterator[Any]:
        patcher = fx._Patcher()
        dispatchers.hooks.patchers.append(patcher)
        try:
            yield patcher
        finally:
            patcher.revert_all_patches()
            dispatchers.hooks.patchers.remove(patcher)

    @contextmanager
    def own_maybe_revert() -> Iterator[None]:
        patcher = dispatchers.hooks.patchers[-1] if dispatchers.hooks.patchers else None
        if patcher is not None:
            patcher.revert_all_patches()
        try:
            yield
        finally:
            if patcher is not None:
                patcher.reapply_all_patches()

    with applied_once("thread_local_hooks"):
        found = fx._new_patcher, fx._maybe_revert_all_patches
        fx._Patcher.patch_method = own_patch_method
        fx._new_patcher, fx._maybe_revert_all_patches = own_new_patcher, own_maybe_revert
        try:
            yield "a trace's hooks on nn.Module act in its own thread only"
        finally:
            fx._Patcher.patch_method = patch_method
            fx._new_patcher, fx._maybe_revert_all_patches = found


@contextmanager
def thread_local_flag_and_hooks() -> Said:
    """Both of the above."""
    with thread_local_flag() as flag, thread_local_hooks() as hooks:
        yield f"{flag}; {hooks}"
