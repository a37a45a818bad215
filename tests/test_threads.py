"""All ranks as threads of one process: the same training, and refused for real work."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch import Tensor

from dflash_mp.config import TrainConfig, UserError, config_dir, to_config
from dflash_mp.threads.play import refuse

Launch = Callable[..., object]
HERE = Path(__file__).parent
THREADS = ("isolation=threads", "race.i_know=true")


def weights(result: object, folder: Path) -> dict[str, Tensor]:
    assert result.returncode == 0, result.stderr[-3000:]
    return load_file(folder / "checkpoints" / "step-000004" / "model.safetensors")


@pytest.mark.distributed
def test_threads_learn_what_processes_learn(launch: Launch, tmp_path: Path) -> None:
    def train(name: str, ranks: int, *overrides: str) -> dict[str, Tensor]:
        folder = tmp_path / name
        settings = ("topology.drafters=2", f"output_dir={folder}", *overrides)
        return weights(launch(ranks, *settings), folder)

    processes = train("processes", 3)
    threads = train("threads", 0, *THREADS)
    assert all(torch.equal(threads[name], value) for name, value in processes.items())
    # Compiled code adds up in another order.
    locked = (*THREADS, "race.treatment=lock", "drafter.compile=aot_eager")
    for name, value in train("locked", 0, *locked).items():
        torch.testing.assert_close(value, processes[name], atol=2e-5, rtol=1e-4)


@pytest.mark.distributed
def test_a_thread_that_fails_ends_the_process_with_its_name(launch: Launch) -> None:
    script = HERE / "failing_thread.py"
    result = launch(0, *THREADS, "topology.drafters=2", script=script, timeout=60)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ROOT CAUSE: thread 2 (drafter1), phase ")
    assert last.endswith("ValueError: a fault of purpose")


@pytest.mark.parametrize(
    ("overrides", "rank", "message"),
    [
        (["isolation=threads"], None, r"say race\.i_know=true"),
        (THREADS, "0", r"without torchrun or launch\.spawn"),
        ([*THREADS, "race.treatment=processes"], None, "is what isolation=processes does"),
        ([*THREADS, "race.treatment=magic"], None, "must be one of none, shim"),
        ([*THREADS, "topology.elastic=true"], None, "elastic=true needs isolation=processes"),
        ([*THREADS, "target.compile=true"], None, r"treatments of race\.treatment are of drafters"),
        (["race.treatment=lock"], None, "nothing in torch is touched"),
    ],
)
def test_threads_are_refused_for_real_work(
    overrides: list[str], rank: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with (
        initialize_config_dir(config_dir(), version_base="1.3"),
        pytest.raises(UserError, match=message),
    ):
        refuse(to_config(compose("train", list(overrides)), TrainConfig))


@pytest.mark.distributed
def test_processes_need_and_leave_torch_untouched(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = HERE / "patched_training.py"
    good = launch(2, script=script)
    assert good.returncode == 0, good.stderr[-3000:]
    monkeypatch.setenv("PATCHED", "1")
    bad = launch(2, script=script)
    assert bad.returncode != 0
    assert "has replaced torch.fx._symbolic_trace.is_fx_symbolic_tracing" in bad.stderr
