"""A small server that keeps the HTTP contract of `kilotok serve` without a model; run as a process by the validation's tests.

The text is a fixed function of prompt, sampling and seed. Options make it break one rule at a time.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

ALLOWED = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "prompt", "messages", "tools", "decode",
           "tree_budget", "draft_length", "domain", "return_token_ids"}
parser = argparse.ArgumentParser()
parser.add_argument("--lie", default="", help="ID@POSITION@DECODE: change one token of this prompt's text in this mode")
parser.add_argument("--die-at", type=int, default=0, help="exit in the middle of the n-th answer")
parser.add_argument("--ignore-decode", action="store_true", help="decode plainly whatever is asked")
parser.add_argument("--refuse", default="", help="prompts that hold this text are refused")
parser.add_argument("--bad-rounds", action="store_true")
parser.add_argument("--fail-start", action="store_true")
parser.add_argument("--log", help="file that gets a line for every request and for the end of this process")
options = parser.parse_args()
num_requests = 0


def log(line: str) -> None:
    if options.log:
        with open(options.log, "a") as f:
            f.write(line + "\n")


def tokens_of(key: str, count: int) -> list[int]:
    return [1000 + hashlib.sha256(f"{key}/{i}".encode()).digest()[0] for i in range(count)]   # words of the pocket's tokenizer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def send_json(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_json({"data": [{"id": "stub"}], "object": "list"} if self.path == "/v1/models" else {"status": "ok", "executor": "stub <b>"})

    def do_POST(self) -> None:
        global num_requests
        num_requests += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrong = sorted(set(body) - ALLOWED) or ([] if body.get("model") == "stub" and body.get("return_token_ids") is True else ["model"])
        chat = self.path.endswith("/chat/completions")
        prompt = json.dumps(body["messages"]) if chat else body["prompt"]
        if wrong or (options.refuse and options.refuse in prompt):
            message = f"unknown field {wrong[0]}" if wrong else "the prompt does not fit."
            self.send_json({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}, 400)
            return
        log(json.dumps({"path": self.path, **body}))
        sampled = body["temperature"] > 0
        count = body["max_tokens"] - 2 if "short" in prompt else body["max_tokens"]
        ids = tokens_of(f"{prompt}/{body['seed'] if sampled else 'greedy'}", count)
        decode = "plain" if options.ignore_decode else body["decode"]
        if options.lie:
            name, position, mode = options.lie.split("@")
            if name in prompt and decode == mode:
                ids[int(position)] = 999
        rounds = [[0, 0, 1]]
        while (left := count - sum(r[2] for r in rounds)) > 0:   # two of three drafts are accepted
            if decode == "tree":   # and three of as many positions of a tree
                tokens = min(4, left)
                rounds.append([body.get("tree_budget", 3), tokens - 1, tokens, 3])
                continue
            tokens = min(3 if decode == "draft" else 1, left)
            rounds.append([3, tokens - 1, tokens] if decode == "draft" else [0, 0, 1])
        self.stream(ids, rounds if not options.bad_rounds else rounds[:-1], chat=chat, said={
            "seed": body.get("seed", 7), "decode": decode, **{name: body[name] for name in ("tree_budget", "draft_length", "domain") if name in body}})

    def stream(self, ids: list[int], rounds: list[list[int]], *, chat: bool, said: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

        def send(choice: dict | None, extra: dict | None = None, usage: dict | None = None) -> None:
            chunk = {"id": "c", "object": "chunk", "created": 0, "model": "stub", "choices": [] if choice is None else [{"index": 0, **choice}],
                     "kilotok": {**said, **(extra or {})}, "usage": usage}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

        if chat:
            send({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        done = 0
        for i, (_, _, size, *_) in enumerate(rounds):
            time.sleep(0.0005)
            if options.die_at == num_requests and i == 2:
                print("out of memory, says the stub", file=sys.stderr, flush=True)
                os._exit(7)
            text = "".join(f" {t}" for t in ids[done:done + size])
            send({"delta": {"content": text}, "finish_reason": None} if chat else {"text": text, "finish_reason": None})
            done += size
        send({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}, {"token_ids": ids, "rounds": rounds})
        send(None, usage={"prompt_tokens": 5, "completion_tokens": len(ids), "total_tokens": 5 + len(ids)})
        self.wfile.write(b"data: [DONE]\n\n")


if options.fail_start:
    sys.exit("error: no room for the stub")
server = HTTPServer(("127.0.0.1", 0), Handler)
log(f"pid {os.getpid()}")
print("loading", flush=True)
print(f"kilotok serve: listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
