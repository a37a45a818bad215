"""Answers that come from a server with a chat endpoint: a real one on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from answering import GREEDY, assistant, make_config, read, user

from dflash_mp.config import UserError
from dflash_mp.data.generate import generate, load_prompts
from dflash_mp.data.responses import Response, Skipped, server_respond


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
