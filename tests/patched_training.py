"""``dflash_mp.train`` in a process in which torch is patched: before (``$PATCHED``), or by it."""

import os

import torch.fx._symbolic_trace

from dflash_mp import train
from dflash_mp.diagnostics.untouched import patched_torch_names

if __name__ == "__main__":
    if os.environ.get("PATCHED"):
        torch.fx._symbolic_trace.is_fx_symbolic_tracing = lambda: False
    train.main()
    assert patched_torch_names() == []
