"""Whole jobs of several processes on a tiny target: same weights whatever the topology."""

import html
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_mp.timeline import draw, read_lanes, read_spans

pytestmark = pytest.mark.distributed

Launch = Callable[..., object]
MEMORY = ["profile=memory", "profile.skip=1", "profile.record=1"]
STEPS = ["profile=steps", "profile.skip=1", "profile.record=2"]


def trained(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of the last checkpoint of a run."""
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def ran(result: object, folder: Path) -> dict[str, Tensor]:
    assert result.returncode == 0, result.stderr[-3000:]
    return trained(folder)


@pytest.fixture(scope="module")
def reference(launch_in: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one target and one drafter under torchrun."""
    base = tmp_path_factory.mktemp("reference")
    ran(launch_in(base, 2, spawn=False), base / "run")
    return base / "run"


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def test_weights_are_bit_equal_for_any_targets_slots_edge_launcher_and_delay(
    launch: Launch, reference: Path, tmp_path: Path
) -> None:
    slow = Path(__file__).parent / "slow_target.py"
    jobs = {
        "2+1, one slot, gloo": {"ranks": 3, "overrides": ["wire.slots=1", "wire.edge=gloo"]},
        "3+1, its steps recorded": {"ranks": 4, "overrides": ["topology.targets=3", *STEPS]},
        "2+1, torchrun, its memory recorded": {"ranks": 3, "overrides": MEMORY, "spawn": False},
        "2+1, delayed at random": {"ranks": 3, "overrides": [], "script": slow},
    }
    for name, job in jobs.items():
        folder = tmp_path / name.replace(",", "").replace(" ", "-")
        overrides = job.pop("overrides")
        result = launch(job.pop("ranks"), f"output_dir={folder}", *overrides, **job)
        assert_same_bits(ran(result, folder), trained(reference))
    peaks = tmp_path / "2+1-torchrun-its-memory-recorded" / "profile"
    recorded = {
        path.name.removesuffix(".memory.json"): json.loads(path.read_text())["phases"]
        for path in peaks.glob("*.memory.json")
    }
    phases = {rank: {row["phase"] for row in rows} for rank, rows in recorded.items()}
    first, second = phases["rank0-target0"], phases["rank1-target1"]
    # A target that comes late may find no frame left to make.
    assert {"load the target"} <= first & second
    assert {"forward"} <= first | second
    assert {"load the drafter", "step", "wait for frame k"} <= phases["rank2-drafter0"]
    # A Python with torch and a model.
    assert all(100 < row["peak_mib"] < 10_000 for rows in recorded.values() for row in rows)


def test_kept_frames_change_nothing(launch: Launch, tmp_path: Path) -> None:
    """Three epochs from kept frames, against the same epochs with the target run every time."""
    epochs = ["steps=null", "epochs=3", "micro_batches_per_step=4", "wire.dtype=fp8"]
    jobs = {
        "captured every time": ["features.cache=ram", "features.cache_gb=1e-9"],
        "ram": ["features.cache=ram"],
        "disk": ["features.cache=disk"],
        "disk again, by one target": ["features.cache=disk", "topology.targets=1"],
    }
    weights = []
    for name, overrides in jobs.items():
        folder = tmp_path / name.replace(",", "").replace(" ", "-")
        ranks = 2 if "topology.targets=1" in overrides else 3
        result = launch(ranks, f"output_dir={folder}", *epochs, *overrides)
        weights.append(ran(result, folder))
    for other in weights[1:]:
        assert_same_bits(other, weights[0])
    assert len(list((tmp_path / "cache" / "frames").iterdir())) == 1
    assert not list(Path("/dev/shm").glob("dflash_mp-*"))


def test_two_drafters_differ_from_one_by_rounding_only(
    launch: Launch, reference: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    weights = ran(launch(3, "topology.drafters=2", f"output_dir={folder}"), folder)
    expected = trained(reference)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-4)
    one, two = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (reference, folder)
    )
    for key in ("train/loss", "train/grad_norm", "eval/acceptance_length", "eval/loss"):
        values = [[row[key] for row in rows if key in row] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), key


def test_a_lost_frame_ends_the_job_with_an_error_that_names_it(
    launch: Launch, tmp_path: Path
) -> None:
    lossy = Path(__file__).parent / "lossy_target.py"
    result = launch(2, "wire.timeout_s=3", "failure.save_s=2.5", script=lossy, timeout=90)
    assert result.returncode != 0
    assert "drafter0: frame 4" in result.stderr
    assert "did not come within 3 s" in result.stderr


def assert_counters_are_there(folder: Path) -> None:
    """Where time went, bytes and FLOPs of the run below, whose steps are logged one by one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/steps_per_s" in row]
    drafter = {"drafter_train", "drafter_wait", "drafter_receive"}
    target = {"target_forward", "target_wait", "target_credit_wait", "target_send", "target_decode"}
    # The targets may be done before the drafter has logged its last steps.
    told = [row for row in steps if "perf/target_mfu" in row]
    for names, where in ((drafter, steps), (target, told)):
        assert where
        assert all(row[f"perf/{name}"] >= 0 for row in where for name in names)
    epochs = [row["data/epoch"] for row in steps]
    assert epochs == sorted(epochs)
    assert epochs[0] > 0
    assert all(0.5 < row["data/fill"] <= 1 for row in steps)
    # As many as drafter.anchors_per_batch.
    assert all(0 < row["data/blocks"] <= 8 for row in steps)
    assert all(0 < row["data/supervised_slots"] <= 8 * 3 for row in steps)
    # On a CPU a share of what a plain product makes.
    assert all(0 < row["perf/drafter_mfu"] < 1 for row in steps)
    assert all(0 < row["perf/target_mfu"] < 1 for row in told)
    assert all(row["perf/target_flop_per_s"] > row["perf/target_mfu"] for row in told)
    # 64 tokens of two hidden states of 32 float32, three int32 and a byte; some of the frames of
    # the eight steps had come before the first began.
    frame = 64 * 2 * 32 * 4 + 4 * 256
    frames = sum(row["perf/wire_bytes_per_s"] / row["perf/steps_per_s"] for row in steps) / frame
    assert frames == pytest.approx(round(frames))
    assert 1 <= round(frames) <= 16


def assert_advised_once(said: str) -> None:
    """By the rates of both roles: which split would be best."""
    (rates,) = re.findall(
        r"2 targets \+ 1 drafters: a target makes ([\d,]+) tokens/s, a drafter takes ([\d,]+); "
        r"(?:no other split|topology\.targets=1 topology\.drafters=2)",
        said,
    )
    assert all(int(rate.replace(",", "")) > 0 for rate in rates)


def test_a_run_leaves_what_it_promises(launch: Launch, tmp_path: Path) -> None:
    decoding = ["evaluate.decode_prompts=3", "evaluate.decode_interval=4"]
    # With one slot the targets cannot be through before the drafter begins.
    profile = ["profile=steps", "profile.skip=1", "profile.record=5", "wire.slots=1"]
    # A frame that was kept takes no FLOPs.
    rest = ["features.cache=off", "trackers=[tensorboard]"]
    # A target that has made nothing has no rate, and there is no advice on the split.
    script = Path(__file__).parent / "sharing_targets.py"
    result = launch(3, "steps=8", *decoding, *profile, *rest, script=script)
    folder = tmp_path / "run"
    ran(result, folder)
    facts = json.loads((folder / "run.json").read_text())
    assert {"command", "commit", "packages"} <= facts.keys()
    assert any("output_dir=" in word for word in facts["command"])
    assert sorted(path.name for path in (folder / "export").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "parity.json",
    ]
    for name in ("loss.png", "acceptance.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("dflash_mp/events.out.tfevents.*"))
    summary = json.loads((folder / "data.json").read_text())
    assert summary["train"]["rows_read"] == 24
    results = json.loads((folder / "results.json").read_text())
    assert results["decoded"]["same"] == results["decoded"]["prompts"] == 3
    assert results["decoded_before"]["acceptance_length"] >= 1.0
    last = [
        json.loads(line) for line in (folder / "decode/step-000008.jsonl").read_text().splitlines()
    ]
    assert [len(row["drafted"]) for row in last] == [len(row["committed"]) for row in last]
    page = (folder / "report.html").read_text()
    for row in last:
        assert html.escape(row["prompt_text"]) in page
        assert all(str(token) in row["pieces"] for token in row["tokens"])
    walked = json.loads((folder / "heldout.json").read_text())
    assert walked["step"] == 8
    assert sum(walked["histogram"]) == walked["cycles"] > 0
    assert_counters_are_there(folder)
    assert_profiled(folder)
    assert_advised_once(result.stdout + result.stderr)
    log = (folder / "rank0.log").read_text()
    assert "settings that differ from the defaults: " in log
    assert "steps=8 (default null)" in log
    for word in ("acceptance length after training", "checkpoints", "export", "plots", "report"):
        assert word in result.stdout
    again = launch(3, spawn=True)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert "Traceback" not in again.stderr


def assert_profiled(folder: Path) -> None:
    """Every rank has left a trace with its phases, and they make a picture."""
    found = {
        path.name.split(".")[0]: {span["name"] for span in read_spans(path)}
        for path in (folder / "profile").glob("*.trace.json.gz")
    }
    assert found.keys() == {"rank0-target0", "rank1-target1", "rank2-drafter0"}
    targets = found["rank0-target0"] | found["rank1-target1"]
    assert {"forward", "wait for a free slot", "send"} <= targets
    drafters = {"step", "compute", "wait for the other drafters' gradients", "receive"}
    assert drafters <= found["rank2-drafter0"]
    lanes = read_lanes(folder / "profile")
    assert [lane.name for lane in lanes[::2]] == ["target0", "target1", "drafter0"]
    steps = lanes[4].bars["drafter: last backward, gradients, update"]
    assert len(steps) == 5
    assert all(a + length <= b for (a, length), (b, _) in pairwise(steps))
    draw(lanes, folder / "profile" / "timeline.png")
    assert (folder / "profile" / "timeline.png").stat().st_size > 5000
