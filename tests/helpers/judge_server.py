"""A scripted OpenAI-compatible server for tests: http.server in a thread, replies by a function of
the request."""

import base64
import io
import json
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


@dataclass
class Answer:
    """What the server sends: a chat completion with this text, or `raw` bytes; first: token ->
    probability of the first token."""

    text: str | None = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    first: dict[str, float] | None = None
    tokens: int | None = 10
    finish: str = "stop"
    delay: float = 0.0

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish,
        }
        if self.first is not None:
            top = [{"token": token, "logprob": math.log(p)} for token, p in self.first.items()]
            choice["logprobs"] = {
                "content": [
                    {"token": top[0]["token"] if top else "", "logprob": 0.0, "top_logprobs": top}
                ]
            }
        data = {"object": "chat.completion", "choices": [choice]}
        return json.dumps(
            data if self.tokens is None else {**data, "usage": {"total_tokens": self.tokens}}
        ).encode()


class JudgeServer:
    """script(body, n) -> str or Answer to request n, from 0. requests: bodies; keys: Authorization
    headers; peak: most at once."""

    def __init__(self, script):
        self.script, self.requests, self.keys, self.paths, self.peak, self.open = (
            script,
            [],
            [],
            [],
            0,
            0,
        )
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    n = len(outer.requests)
                    outer.requests.append(body)
                    outer.keys.append(self.headers.get("Authorization"))
                    outer.paths.append(self.path)
                    outer.open += 1
                    outer.peak = max(outer.peak, outer.open)
                answer = outer.script(body, n)
                answer = answer if isinstance(answer, Answer) else Answer(answer)
                time.sleep(answer.delay)
                with outer.lock:
                    outer.open -= 1
                self.send(answer)

            def do_GET(self):
                known = self.path.endswith("/v1/models")
                self.send(
                    Answer(
                        raw=b'{"data": [{"id": "the-model"}]}' if known else b"Not Found",
                        status=200 if known else 404,
                    )
                )

            def send(self, answer):
                data = answer.body()
                try:
                    self.send_response(answer.status)
                    for name, value in {
                        "Content-Type": "application/json",
                        **answer.headers,
                        "Content-Length": str(len(data)),
                    }.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client gave up
                    self.close_connection = True

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.block_on_close = True, False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def settings(self, **more):
        """Settings that every judge shares, fast to fail."""
        return {"base_url": self.url, "backoff": 0.01, "retries": 2, "timeout": 5.0, **more}


@contextmanager
def serving(script):
    server = JudgeServer(script if callable(script) else lambda body, n: script)
    thread = threading.Thread(
        target=server.http.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def words(body, message=-1):
    """The text of one message of a request, <image> where a picture stands."""
    content = body["messages"][message]["content"]
    return (
        content
        if isinstance(content, str)
        else "".join(part.get("text", "<image>") for part in content)
    )


def pictures(body):
    """The pictures of a request, decoded, in order."""
    parts = [
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))) for url in urls]
