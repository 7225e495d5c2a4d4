"""A scripted OpenAI-compatible server for tests: replies are a function of the request."""

import base64
import io
import json
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

from PIL import Image

from flowrl.rewards.judge import client


@dataclass
class Answer:
    """What the server sends."""

    text: str | None = ""  # of a chat completion
    status: int = 200  # of HTTP
    headers: dict[str, str] = field(default_factory=dict)  # beside the usual ones
    raw: bytes | None = None  # the whole body, in place of a chat completion
    first: dict[str, float] | None = None  # token -> probability of the first token
    tokens: int | None = 10  # usage that it states; None: nothing is said
    finish: str = "stop"  # finish_reason
    delay: float = 0.0  # seconds before it is sent

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish,
        }
        if self.first is not None:
            choice["logprobs"] = {"content": [self.first_position()]}
        data = {"object": "chat.completion", "choices": [choice]}
        usage = {} if self.tokens is None else {"usage": {"total_tokens": self.tokens}}
        return json.dumps(data | usage).encode()

    def first_position(self):
        top = [{"token": token, "logprob": math.log(p)} for token, p in self.first.items()]
        return {"token": top[0]["token"] if top else "", "logprob": 0.0, "top_logprobs": top}


class Handler(BaseHTTPRequestHandler):
    """Answers with what the script of its JudgeServer says; a subclass has that as `judge`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = self.judge.arrived(body, self.headers.get("Authorization"), self.path)
        answer = self.judge.script(body, number)
        answer = answer if isinstance(answer, Answer) else Answer(answer)
        time.sleep(answer.delay)
        self.judge.left()
        self.send(answer)

    def do_GET(self):
        if self.path.endswith("/v1/models"):
            self.send(Answer(raw=b'{"data": [{"id": "the-model"}]}'))
        else:
            self.send(Answer(raw=b"Not Found", status=404))

    def send(self, answer):
        data = answer.body()
        headers = {"Content-Type": "application/json", **answer.headers}
        try:
            self.send_response(answer.status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client gave up
            self.close_connection = True

    def log_message(self, *args):
        pass


class JudgeServer:
    """script(body, n) -> str or Answer to request n, from 0.

    requests: bodies. keys: Authorization headers. peak: most at once.
    """

    def __init__(self, script):
        self.script = script
        self.requests, self.keys, self.paths = [], [], []
        self.open = self.peak = 0
        self.lock = threading.Lock()
        handler = type("OwnHandler", (Handler,), {"judge": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads, self.http.block_on_close = True, False

    def arrived(self, body, key, path):
        """Notes a request -> its number."""
        with self.lock:
            self.requests.append(body)
            self.keys.append(key)
            self.paths.append(path)
            self.open += 1
            self.peak = max(self.peak, self.open)
            return len(self.requests) - 1

    def left(self):
        with self.lock:
            self.open -= 1

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def settings(self, **more):
        """Settings that every judge shares, fast to fail."""
        return {"base_url": self.url, "retries": 2, "timeout": 5.0, **more}


@contextmanager
def serving(script, pause=0.01):
    server = JudgeServer(script if callable(script) else lambda body, n: script)
    thread = threading.Thread(
        target=server.http.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True
    )
    thread.start()
    try:
        with mock.patch.object(client, "FIRST_PAUSE", pause):
            yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def words(body, message=-1):
    """The text of one message of a request, <image> where a picture stands."""
    content = body["messages"][message]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "<image>") for part in content)


def pictures(body):
    """The pictures of a request, decoded, in order."""
    contents = [message["content"] for message in body["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))) for url in urls]
