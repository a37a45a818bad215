import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dflash_mp
from dflash_mp.config import UserError, config_dir, to_config
from dflash_mp.data.generate import (
    GenerateConfig,
    answer_batches,
    generate,
    load_prompts,
    rank_batches,
)
from dflash_mp.data.parts import Parts
from dflash_mp.data.responses import (
    Response,
    RowSampler,
    Sampling,
    Skipped,
    local_respond,
    server_respond,
)
from dflash_mp.data.turns import answer_conversations

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
SAMPLED = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=0)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    # The pad token is the stop token, which also stands in every prompt.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    """A random model with several stop tokens, so that some replies end by themselves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=200,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [1, *range(40, 60)]
    return model


@pytest.fixture(scope="module")
def target_folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "messages": [user(t)]} for n, t in enumerate(TEXTS * 3)]
    # U+2028 inside a string is no end of line.
    rows[5]["messages"][0]["content"] = "a\u2028b"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return path


def make_config(prompts, output, *overrides):
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("generate", [f"data.prompts={prompts}", f"output={output}", *overrides])
    return to_config(raw, GenerateConfig)


def read(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line]


def plain_greedy(model, tokenizer, messages, stop_ids, count):
    """Token by token, the whole text again each time, no cache and no padding."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids = list(ids["input_ids"])
    reply = []
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids + reply])).logits[0, -1].argmax())
        if token in stop_ids:
            return reply, "stop"
        reply.append(token)
    return reply, "length"


def echo(conversations, seeds):
    """Stands in for a target: replies with the last message, turned around."""
    return [
        Response(m[-1]["content"][::-1], "stop", [len(m), s % 97])
        for m, s in zip(conversations, seeds, strict=True)
    ]


# Decoding


def test_batch_equals_plain_greedy_of_each_prompt(model, tokenizer):
    exact = LlamaForCausalLM(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    stop_ids = [1, *range(40, 60)]
    exact.generation_config.eos_token_id = stop_ids
    # A checkpoint's own settings must not change the text.
    exact.generation_config.repetition_penalty = 5.0
    exact.generation_config.do_sample = True
    conversations = [[user(text)] for text in TEXTS]
    replies = local_respond(exact, tokenizer, GREEDY)(conversations, [0] * len(TEXTS))
    expected = [plain_greedy(exact, tokenizer, c, stop_ids, 12) for c in conversations]
    assert [(r.token_ids, r.finish_reason) for r in replies] == expected
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert [r.text for r in replies] == [tokenizer.decode(ids) for ids, _ in expected]


def test_sampled_row_does_not_depend_on_its_batch(model, tokenizer):
    conversations, seeds = [[user(text)] for text in TEXTS], list(range(len(TEXTS)))
    respond = local_respond(model.double(), tokenizer, SAMPLED)
    together = respond(conversations, seeds)
    alone = [respond([c], [s])[0] for c, s in zip(conversations, seeds, strict=True)]
    assert together == alone
    assert respond(conversations, [s + 100 for s in seeds]) != together
    model.float()


def test_sampling_follows_the_nucleus():
    scores = torch.tensor([2.0, 1.0, 0.5, 0.0, -3.0])
    rows = 4000
    sampler = RowSampler(list(range(rows)), Sampling(1, 2.0, 0.85, 0), torch.device("cpu"))
    drawn = sampler(torch.zeros(rows, 1, dtype=torch.long), scores.expand(rows, -1)).argmax(-1)
    share = torch.bincount(drawn, minlength=5) / rows
    # The smallest set of most likely tokens that holds at least 0.85 of the probability.
    wanted = torch.softmax(scores / 2.0, 0)
    kept = wanted.cumsum(0) - wanted < 0.85
    wanted = torch.where(kept, wanted, 0.0) / wanted[kept].sum()
    assert share[~kept].sum() == 0
    assert torch.allclose(share, wanted, atol=0.03)


def test_too_long_prompt_is_skipped_and_the_rest_answered(model, tokenizer):
    conversations = [[user("y" * 300)], [user("Hi")]]
    long, short = local_respond(model, tokenizer, GREEDY)(conversations, [0, 0])
    assert isinstance(long, Skipped)
    assert "no room" in long.reason
    assert isinstance(short, Response)


# Turns


def test_every_open_turn_is_answered_in_turn():
    rows = {
        0: {"id": "a", "source": "s", "messages": [user("one"), user("two"), user("three")]},
        1: {"id": "b", "source": "s", "messages": [user("ab"), assistant("given"), user("cd")]},
        2: {"id": "c", "source": "s", "messages": [{"role": "system", "content": "S"}, user("x")]},
    }
    first, second, third = (e["row"] for e in answer_conversations(rows, echo, seed=0))
    said = [(m["role"], m["content"]) for m in first["messages"]]
    assert said == [
        ("user", "one"),
        ("assistant", "eno"),
        ("user", "two"),
        ("assistant", "owt"),
        ("user", "three"),
        ("assistant", "eerht"),
    ]
    assert first["finish_reason"] == ["stop"] * 3
    # Each turn saw all the messages before it.
    assert [ids[0] for ids in first["response_token_ids"]] == [1, 3, 5]
    assert [m["content"] for m in second["messages"]] == ["ab", "given", "cd", "dc"]
    assert second["finish_reason"] == [None, "stop"]
    assert second["response_token_ids"][0] is None
    assert third["finish_reason"] == "stop"
    assert third["response_token_ids"][0] == 2
    assert [m["content"] for m in third["messages"]] == ["S", "x", "x"]


def test_skipped_turn_keeps_the_turns_before_it():
    def second_turn_fails(conversations, seeds):
        replies = echo(conversations, seeds)
        return [
            Skipped("too long") if len(m) > 1 else r
            for m, r in zip(conversations, replies, strict=True)
        ]

    rows = {0: {"id": "a", "source": "s", "messages": [user("one"), user("two")]}}
    (entry,) = answer_conversations(rows, second_turn_fails, seed=0)
    assert [m["content"] for m in entry["row"]["messages"]] == ["one", "eno"]
    assert entry["row"]["finish_reason"] == "stop"
    assert entry["skipped"] == "a: too long"


# Resuming


def run(prompts, output, respond, rank=0, world_size=1, merge=True):
    with Parts(output, "d" * 64, rank) as parts:
        batches = rank_batches(prompts, rank, world_size, 3)
        answer_batches(prompts, batches, parts, respond, 0, False)
        return parts.merge(len(prompts)) if merge else None


def test_resumes_after_a_kill_at_any_byte(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    whole = tmp_path / "whole.jsonl"
    run(prompts, whole, echo, merge=False)
    part = tmp_path / f"whole.jsonl.parts-{'d' * 12}" / "rank0.jsonl"
    lines = part.read_bytes()
    run(prompts, whole, echo)
    assert [row["id"] for row in read(whole)] == [f"p{n}" for n in range(len(prompts))]

    line_end = lines.index(b"\n") + 1
    for cut in (*range(0, len(lines), 97), line_end - 1, line_end, len(lines)):
        output = tmp_path / f"cut{cut}.jsonl"
        folder = tmp_path / f"cut{cut}.jsonl.parts-{'d' * 12}"
        folder.mkdir()
        (folder / "rank0.jsonl").write_bytes(lines[:cut])
        asked = []

        def respond(conversations, seeds, asked=asked):
            asked.extend(conversations)
            return echo(conversations, seeds)

        run(prompts, output, respond)
        assert output.read_bytes() == whole.read_bytes()
        # Nothing is done twice: what has its whole line is not asked again.
        assert len(asked) == len(prompts) - lines[:cut].count(b"\n")
        assert not folder.exists()


def test_ranks_together_write_what_one_rank_writes(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    run(prompts, tmp_path / "one.jsonl", echo)
    # A job of three ranks that was killed when rank 2 had finished, resumed with two.
    run(prompts, tmp_path / "two.jsonl", echo, rank=2, world_size=3, merge=False)
    run(prompts, tmp_path / "two.jsonl", echo, rank=1, world_size=2, merge=False)
    run(prompts, tmp_path / "two.jsonl", echo, rank=0, world_size=2)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_torn_line_of_a_rank_that_is_gone_is_not_taken(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    run(prompts, tmp_path / "one.jsonl", echo)
    run(prompts, tmp_path / "two.jsonl", echo, rank=1, world_size=2, merge=False)
    part = tmp_path / f"two.jsonl.parts-{'d' * 12}" / "rank1.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    run(prompts, tmp_path / "two.jsonl", echo)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_rank_zero_waits_for_the_others(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    output = tmp_path / "out.jsonl"
    results = []
    waiting = threading.Thread(target=lambda: results.append(run(prompts, output, echo, 0, 2)))
    waiting.start()
    time.sleep(0.3)
    assert not output.exists()
    run(prompts, output, echo, rank=1, world_size=2, merge=False)
    waiting.join(timeout=20)
    assert results == [(len(prompts), [])]


def test_refuses_to_mix_or_overwrite(tmp_path, prompt_file):
    output = tmp_path / "out.jsonl"
    with (
        Parts(output, "a" * 64, 0),
        pytest.raises(UserError, match="being written by another process"),
    ):
        Parts(output, "a" * 64, 0)
    with pytest.raises(UserError, match="other prompts or settings"):
        Parts(output, "b" * 64, 0)
    output.touch()
    with pytest.raises(UserError, match=r"out\.jsonl exists"):
        Parts(output, "a" * 64, 0)


def test_all_prompts_skipped_is_an_error(tmp_path, prompt_file):
    def never(conversations, seeds):
        return [Skipped("too long") for _ in conversations]

    prompts = load_prompts(str(prompt_file))
    with pytest.raises(UserError, match="all 18 prompts were skipped; the first one: p0: too long"):
        run(prompts, tmp_path / "out.jsonl", never)
    assert not (tmp_path / "out.jsonl").exists()


# The command


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[]", 'needs "messages"'),
        ('{"messages": [{"role": "user"}]}', 'needs "messages"'),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
        ('{"messages": []}', "every user turn has its reply"),
    ],
)
def test_bad_prompt_is_named_by_its_line(tmp_path, line, problem):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"prompts\.jsonl:2: .*{problem}"):
        load_prompts(str(path))


def test_generate_writes_exact_ids_in_prompt_order(tmp_path, prompt_file, target_folder, tokenizer):
    output = tmp_path / "out.jsonl"
    config = make_config(
        prompt_file, output, f"target.name={target_folder}", "max_new_tokens=6", "batch_size=4"
    )
    generate(config, rank=0, world_size=1)
    rows = read(output)
    assert [row["id"] for row in rows] == [f"p{n}" for n in range(18)]
    for row, prompt in zip(rows, load_prompts(str(prompt_file)), strict=True):
        assert list(row) == ["id", "messages", "finish_reason", "response_token_ids", "source"]
        assert row["messages"][:-1] == prompt["messages"]
        assert row["messages"][-1] == assistant(tokenizer.decode(row["response_token_ids"]))
        assert (len(row["response_token_ids"]) == 6) == (row["finish_reason"] == "length")
        assert row["source"] == "prompts"
    with pytest.raises(UserError, match="exists"):
        generate(config, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=0", "batch_size=0: must be at least 1"),
        ("max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
        ("temperature=-1", "temperature=-1.0: must not be negative"),
        ("top_p=0", r"top_p=0.0: must be in \(0, 1\]"),
    ],
)
def test_bad_settings_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        make_config("p.jsonl", "o.jsonl", override)


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_command_resumes_with_other_ranks(tmp_path, prompt_file, target_folder):
    """One process, killed outright with work half done; two under torchrun finish it."""
    output = tmp_path / "out.jsonl"
    arguments = [
        f"data.prompts={prompt_file}",
        f"target.name={target_folder}",
        "max_new_tokens=100",
        "batch_size=1",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(dflash_mp.__file__).parent.parent),
    }
    command = ["-m", "dflash_mp.data.generate", *arguments]
    whole = tmp_path / "whole.jsonl"
    subprocess.run(
        [sys.executable, *command, f"output={whole}"], env=environment, check=True, timeout=120
    )
    process = subprocess.Popen(
        [sys.executable, *command, f"output={output}"], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (finished := [p for p in tmp_path.glob("out.jsonl.parts-*/*") if p.stat().st_size]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    before = finished[0].read_bytes()
    assert 0 < before.count(b"\n") < 18
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [sys.executable, *torchrun, *command, f"output={output}"],
        env=environment,
        check=True,
        timeout=120,
    )
    assert output.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.parts-*"))


# The server


class ChatServer(BaseHTTPRequestHandler):
    """A small chat endpoint: turns the last message around; some messages make it fail."""

    requests: list

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append((self.path, body))
        text = body["messages"][-1]["content"]
        status = {"bad": 400, "broken": 500}.get(text, 200)
        choice = {"message": assistant(text[::-1]), "finish_reason": "stop"}
        if text == "long":
            choice["finish_reason"] = "length"
        if text == "filtered":
            choice["finish_reason"] = "content_filter"
        answer = {"choices": [choice]} if text != "odd" else {"error": "?"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


class Listener(ThreadingHTTPServer):
    # All requests of a batch come at once.
    request_queue_size = 64


@pytest.fixture
def server():
    ChatServer.requests = []
    http = Listener(("127.0.0.1", 0), ChatServer)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_generate_through_a_server(tmp_path, prompt_file, server):
    output = tmp_path / "out.jsonl"
    config = make_config(
        prompt_file, output, f"server={server}", "target.name=served", "temperature=0.5", "seed=3"
    )
    generate(config, rank=0, world_size=1)
    rows, prompts = read(output), load_prompts(str(prompt_file))
    assert [row["id"] for row in rows] == [row["id"] for row in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        assert list(row) == ["id", "messages", "finish_reason", "source"]
        assert row["messages"][-1]["content"] == prompt["messages"][-1]["content"][::-1]
    paths, bodies = zip(*ChatServer.requests, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    assert {b["model"] for b in bodies} == {"served"}
    assert {(b["max_tokens"], b["temperature"], b["top_p"]) for b in bodies} == {(512, 0.5, 1.0)}
    assert len({b["seed"] for b in bodies}) == len(prompts)


def test_server_replies_keep_their_reasons(server):
    respond = server_respond(server + "/v1/", "served", GREEDY)
    texts = ["fine", "long", "filtered", "bad"]
    fine, long, filtered, bad = respond([[user(text)] for text in texts], [0] * 4)
    assert {path for path, _ in ChatServer.requests} == {"/v1/chat/completions"}
    assert fine == Response("enif", "stop", None)
    assert long == Response("gnol", "length", None)
    assert isinstance(filtered, Skipped)
    assert "content_filter" in filtered.reason
    assert isinstance(bad, Skipped)
    assert "400" in bad.reason


def test_server_that_fails_is_one_line(server):
    respond = server_respond(server, "served", GREEDY)
    with pytest.raises(UserError, match="answered 500"):
        respond([[user("broken")]], [0])
    with pytest.raises(UserError, match="did not answer like a chat endpoint"):
        respond([[user("odd")]], [0])
    with pytest.raises(UserError, match="cannot be reached"):
        server_respond("http://127.0.0.1:1", "served", GREEDY)([[user("x")]], [0])
