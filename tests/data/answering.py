"""What tests of answered prompts share: texts, a stand-in for a target, settings, rows."""

import json
from pathlib import Path

from hydra import compose, initialize_config_dir

from dflash_mp.config import config_dir, to_config
from dflash_mp.data.generate import GenerateConfig
from dflash_mp.data.responses import Response, Sampling

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
# Prompts of very different lengths, so that left padding matters.
TEXTS = [
    "Hi",
    "What is a list?",
    "x" * 60,
    "Write a function that sorts numbers.",
    "ab",
    "Why? " * 9,
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def make_config(prompts, output, *overrides):
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("generate", [f"data.prompts={prompts}", f"output={output}", *overrides])
    return to_config(raw, GenerateConfig)


def read(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line]


def echo(conversations, seeds):
    """Stands in for a target: replies with the last message, turned around."""
    return [
        Response(m[-1]["content"][::-1], "stop", [len(m), s % 97])
        for m, s in zip(conversations, seeds, strict=True)
    ]
