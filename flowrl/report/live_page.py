"""The report of a run that is going, or the comparison of several, as a page that follows them.

The server answers this machine alone and writes nothing into the folders of runs, which may be
mounted read-only. The script in templates/live.html replaces those sections that have changed.
"""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from flowrl.report import comparison, comparison_page, run_page
from flowrl.runtime.store import files, history
from flowrl.runtime.store.run_folder import METRICS, RunFolder, read, trained_iterations
from flowrl.runtime.text import error_text

HOST, PORT = "127.0.0.1", 8322
MEDIA = (".png", ".jpg", ".webp", ".gif", ".mp4")  # files of samples/ that are given out
# what a page shows; a sample is renamed into its folder, which dates the folder
WATCHED = ("*.json", "*.jsonl", "config.yaml", "samples", "suites/*.json")


class LivePage:
    """The page of one or several runs. It is made again when somebody asks and a file differs."""

    def __init__(self, runs: list[Path], group: str | None = None) -> None:
        """A folder that is not a run -> ValueError."""
        self.runs, self.group, self.lock = runs, group, Lock()
        self.seen: list[Any] | None = None  # files as they were when the page was made
        self.make()

    def make(self) -> None:
        version = str(time.time_ns())
        if len(self.runs) == 1 and self.group is None:
            self.folders = [read(self.runs[0], spare=True)]
            html = run_page.page(self.folders[0], "live.html", page="run.html", version=version)
        else:
            groups = comparison.grouped(self.runs, self.group)
            self.folders = [run.folder for runs in groups.values() for run in runs]
            live = {"page": "comparison.html", "version": version}
            html = comparison_page.page(groups, "live.html", **live)
        self.html, self.version = html.encode(), version

    def state(self) -> dict[str, str]:
        """Make the page again if it is not up to date -> its version, and how the runs are."""
        with self.lock:
            try:
                paths = [p for run in self.runs for part in WATCHED for p in run.glob(part)]
                found = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
                if found != self.seen:
                    self.make()
                self.seen, said = found, " ".join(map(status, self.folders))
            except (ValueError, OSError) as error:  # the folder is gone, say
                self.seen, said = None, error_text(error)
            return {"version": self.version, "said": said}


def status(run: RunFolder) -> str:
    """Say whether a run is going, and how far it is."""
    name, last = run.path.name, (history.read(run.path) or [{}])[-1]
    if last.get("event") in ("ended", "failed"):
        return f"{name} {last['event']} after iteration {last['iteration']}: {last.get('what')}."
    if files.gone(last.get("host"), last.get("pid")):
        again = f"flowrl train --resume {run.path} goes on"
        return f"{name} was killed: process {last['pid']} is gone; {again}."
    trained = trained_iterations(run.metrics)
    if not trained:
        return f"{name} has started, and has not finished an iteration."
    of = run_page.settings_of(run).get("iterations", "?")
    ago = max(0, time.time() - (run.path / METRICS).stat().st_mtime)
    took = run.metrics[-1].get("time/iteration") or 0
    done = f"{name} finished iteration {trained[-1]} of {of}"
    return f"{done}, which took {took:.3g} s, {ago:.0f} s ago."


class LiveAnswer(SimpleHTTPRequestHandler):
    """Answers a request: with the page, with its state, or with a sample of its one run."""

    def __init__(self, page: LivePage, *request: Any) -> None:
        self.page, self.samples = page, (page.runs[0] / "samples").resolve()
        with suppress(ConnectionError, TimeoutError):  # the client went away
            super().__init__(*request, directory=str(page.runs[0]))

    def send_head(self) -> Any:
        """Send status and headers -> the body."""
        host = self.headers.get("Host", "").lower()
        # a request to another name comes from a site that lets its own name mean this machine
        if (host.rpartition(":")[0] or host) not in (HOST, "localhost"):
            return self.send_error(403, f"Only {HOST} and localhost are answered")
        file, state = Path(self.translate_path(self.path)), self.page.state()
        own = os.path.isfile(file) and file.resolve().is_relative_to(self.samples)
        if own and file.suffix in MEDIA:
            return super().send_head()
        answers = {"/": ("text/html; charset=utf-8", self.page.html)}
        answers["/state"] = ("application/json", json.dumps(state).encode())
        if self.path not in answers:
            return self.send_error(404)
        kind, body = answers[self.path]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page asks once a second."""


def listen(page: LivePage, port: int | None) -> ThreadingHTTPServer:
    """Open a port of this machine; without one, PORT or a free one. One that is taken ->
    ValueError."""
    for chosen in (PORT, 0) if port is None else (port,):
        with suppress(OSError):
            return ThreadingHTTPServer((HOST, chosen), partial(LiveAnswer, page))
    raise ValueError(f"--port {port} is taken, or not yours to open; leave it out for a free one")
