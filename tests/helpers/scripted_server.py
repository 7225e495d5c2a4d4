"""A reward server that says what a test lets it say."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading

from flowrl.rewards.server import wire


@contextlib.contextmanager
def scripted(answer):
    """An HTTP server of answer(path, body) -> (status, text).

    In place of the text: a function that writes the whole answer to a file.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            status, text = answer(self.path, self.rfile.read(length))
            if callable(text):
                with contextlib.suppress(OSError):
                    text(self.wfile)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def about(**changes):
    served = {
        "scale": "s",
        "needs": [],
        "reads": [],
        "reads_prompt": False,
        "video": "yes",
        "rounds": False,
        "weight": 1.0,
    }
    record = {
        "protocol": wire.PROTOCOL,
        "flowrl": "0",
        "version": "v",
        "rewards": {"jpeg": served},
        "total": served,
        "max_mb": 1.0,
        "max_samples": 9,
    }
    return json.dumps(record | changes)


def request_of(body):
    """The JSON of a request that flowrl sent."""
    return json.loads(wire.split(body)[0])


def reply(body, **changes):
    asked = request_of(body)
    count = len(asked["prompts"])
    record = {
        "id": asked["id"],
        "version": "v",
        "scores": [0.5] * count,
        "parts": {},
        "errors": [None] * count,
    }
    return json.dumps(record | changes)
