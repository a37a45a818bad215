"""Is the torch of this process as it was installed?"""

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

# Where trainers and this package's treatments patch torch for the sake of threads.
_MODULES = (
    "torch.compiler",
    "torch._dynamo.convert_frame",
    "torch._dynamo.eval_frame",
    "torch._higher_order_ops.utils",
    "torch.fx._symbolic_trace",
    "torch.fx.traceback",
)
_CLASSES = (
    ("torch.fx._symbolic_trace", "Tracer"),
    ("torch.fx._symbolic_trace", "_Patcher"),
    ("torch.nn.modules.module", "Module"),
)
_CONFIG = ("error_on_nested_fx_trace", "force_compile_during_fx_trace")


def patched_torch_names() -> list[str]:
    """Name what has been replaced in the parts of torch that the race is about.

    Looks only at modules which are imported already, since nothing else can have been patched.

    Returns:
        Sorted dotted names; empty when torch is as installed.
    """
    names = []
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        if type(module) is not types.ModuleType or _attribute(name) is not module:
            names.append(name)
            continue
        names += [f"{name}.{n}" for n, v in vars(module).items() if _is_foreign(v)]
    for name, class_name in _CLASSES:
        if (module := sys.modules.get(name)) is not None and (
            cls := getattr(module, class_name, None)
        ):
            # Libraries may add methods of their own (transformers: Module.smart_apply); a patch is
            # a name of torch's that runs somebody else's code.
            source = inspect.getsource(module)
            members = [(n, v) for n, v in vars(cls).items() if re.search(rf"\b{n}\b", source)]
            names += [f"{name}.{class_name}.{n}" for n, v in members if _is_foreign(v)]
    names += _stuck_state()
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        for key in _CONFIG:
            entry = vars(config)["_config"].get(key)
            if entry is not None and getattr(config, key) != entry.default:
                names.append(f"torch._dynamo.config.{key}")
    return sorted(set(names))


def _attribute(dotted: str) -> Any:
    parent, _, name = dotted.rpartition(".")
    return getattr(sys.modules[parent], name, None)


def _is_foreign(value: Any) -> bool:
    """Whether ``value`` runs code from outside torch and the standard library."""
    inside = (str(Path(torch.__file__).parent), str(Path(inspect.__file__).parent))
    # Code made by exec, such as a dataclass's methods, has no file.
    return any(
        not f.__code__.co_filename.startswith((*inside, "<")) for f in _functions_within(value)
    )


def _functions_within(value: Any) -> list[types.FunctionType]:
    """Return ``value`` and the functions it wraps: by ``__wrapped__`` and in its closure."""
    if not isinstance(value, types.FunctionType):
        return []
    cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
    return [f for f in (value, inspect.unwrap(value), *cells) if isinstance(f, types.FunctionType)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _stuck_state() -> list[str]:
    """What a trace leaves behind when it meets another thread's."""
    names = []
    fx: Any = sys.modules["torch.fx._symbolic_trace"]
    for method, original in (
        ("__call__", "_orig_module_call"),
        ("__getattr__", "_orig_module_getattr"),
    ):
        if getattr(torch.nn.Module, method) is not getattr(fx, original):
            names.append(f"torch.nn.modules.module.Module.{method}")
    if getattr(fx, "_is_fx_tracing_flag", False):
        names.append("torch.fx._symbolic_trace._is_fx_tracing_flag")
    return names
