"""flowrl live: the page follows its runs, says how they are, answers this machine alone and writes
nothing."""

import http.client
import json
import signal
import subprocess
import sys
import threading

import pytest
import small
import typer

from flowrl.report import live_page, run_page
from flowrl.runtime.store import history
from flowrl.runtime.store.lock import Lock
from flowrl.runtime.store.run_folder import add_metrics, read


def write(folder, iterations=2):
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: {name: nft}\niterations: 5\nseed: 0\n")
    history.add(folder, "started", iteration=0)
    for i in range(1, iterations + 1):
        add_metrics(folder, i, {"reward/total": i / 10, "time/iteration": 2.0})
    return folder


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "mine")


@pytest.fixture
def served(run):
    with live_page.listen(live_page.LivePage([run]), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def asked(address, path, method="GET", **headers):
    """(status, body) of an answer."""
    made = http.client.HTTPConnection(*address, timeout=10)
    made.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        made.putheader(*(name, value) if value else ("X", "no host"))
    made.endheaders()
    answer = made.getresponse()
    return answer.status, answer.read()


def test_the_page_is_the_report_and_follows_the_run_without_writing(run, served):
    address = served.server_address
    with Lock(run, "flowrl train"):
        files = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")}
        before, page = (asked(address, path)[1].decode() for path in ("/state", "/"))
        assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")} == files
    assert run_page.page(read(run)).split("</header>")[1].split("</main>")[0] in page
    assert json.loads(before)["version"] in page and "finished iteration 2 of 5" in before
    add_metrics(run, 3, {"reward/total": 0.3})
    after, page = (asked(address, path)[1].decode() for path in ("/state", "/"))
    assert json.loads(after)["version"] in page and "finished iteration 3 of 5" in after
    assert "iteration 3: 0.300" in page


def edit(run, **facts):
    (run / history.FILE).write_text(json.dumps(history.read(run)[-1] | facts) + "\n")


STATES = {  # what happens in the folder -> what the page says
    "started": (lambda run: (run / "metrics.jsonl").unlink(), "has not finished an iteration"),
    "ended": (lambda run: edit(run, event="ended", what="all is done"), "iteration 0: all is done"),
    "failed": (
        lambda run: edit(run, event="failed", what="no disk"),
        "mine failed after iteration 0",
    ),
    "elsewhere": (
        lambda run: edit(run, host="gpu7", pid=2**22 + 1),
        "iteration 2 of 5, which took",
    ),
    "killed": (
        lambda run: edit(run, pid=2**22 + 1),
        "killed: process 4194305 is gone; flowrl train",
    ),
    "torn": (lambda run: (run / "metrics.jsonl").open("a").write('{"it'), "finished iteration 2"),
    "gone": (lambda run: run.rename(run.parent / "moved"), 'mine" is not a folder'),
    "emptied": (lambda run: [p.unlink() for p in run.glob("*.*")], "does not hold a run"),
    "damaged": (lambda run: (run / "config.yaml").write_text("a: ["), "was edited or damaged"),
}


@pytest.mark.parametrize("kind", STATES)
def test_the_page_says_how_the_run_is_and_shows_what_it_can(run, kind):
    happens, said = STATES[kind]
    page = live_page.LivePage([run])
    happens(run)
    assert said in page.state()["said"] and b"Learning curves" in page.html
    assert (b"Line 3 of metrics.jsonl was cut short" in page.html) == (kind == "torn")


def test_a_page_is_made_again_only_after_a_change(run, monkeypatch):
    made = []
    monkeypatch.setattr(run_page, "page", lambda *_, **__: made.append(1) or "")
    page = live_page.LivePage([run])
    for count in (2, 3):  # with the first, before anybody asks
        [page.state() for _ in range(5)]
        assert len(made) == count
        add_metrics(run, count + 1, {"reward/total": 0.3})


REFUSED = [  # path, method, name of the host, status
    ("/", "GET", "evil.example:8322", 403),
    ("/state", "GET", "127.0.0.1.evil.example", 403),
    ("/samples/a%20b.png", "GET", "", 403),
    ("/", "GET", "[::1", 403),
    ("/", "POST", "localhost", 501),
    ("/samples/../config.yaml", "GET", "localhost", 404),
    ("/samples/..%2f..%2fsecret.png", "GET", "localhost", 404),
    ("/..//..//secret.png", "GET", "localhost", 404),
    ("/samples/link.png", "GET", "localhost", 404),
    ("/samples/%00.png", "GET", "localhost", 404),
    ("/samples/", "GET", "localhost", 404),
    ("/samples/notes.html", "GET", "localhost", 404),
    ("/" + "a" * 5000 + ".png", "GET", "localhost", 404),
    ("/samples/a%20b.png", "GET", "127.0.0.1:8000", 200),  # ssh -L has a port of its own
    ("/samples/a%20b.png?1", "HEAD", "LOCALHOST", 200),
]


@pytest.mark.parametrize(("path", "method", "host", "status"), REFUSED)
def test_only_this_machine_reads_and_only_the_page_and_its_samples(
    served, run, path, method, host, status
):
    for secret in (run.parent / "secret.png", run / "samples" / "notes.html"):
        secret.write_bytes(b"secret")
    (run / "samples" / "a b.png").write_bytes(b"picture")
    (run / "samples" / "link.png").symlink_to(run.parent / "secret.png")
    found, body = asked(served.server_address, path, method, Host=host)
    assert found == status and b"secret" not in body
    assert status != 200 or body == (b"picture" if method == "GET" else b"")


def test_several_runs_are_a_comparison(tmp_path):
    page = live_page.LivePage([write(tmp_path / "a"), write(tmp_path / "b", 3)])
    assert b"2 runs compared" in page.html and b'class="live"' in page.html
    assert all(f"{said} of 5" in page.state()["said"] for said in ("iteration 2", "iteration 3"))


def test_a_port_that_is_taken_is_said_or_another_one_found(served, run, monkeypatch):
    found = small.invoke("live", run, "--port", served.server_port)
    assert found.exit_code == 2 and f"--port {served.server_port} is taken" in found.output
    monkeypatch.setattr(live_page, "PORT", served.server_port)

    def interrupted(address):
        raise KeyboardInterrupt  # as Ctrl-C does; a signal would go to whatever handler is set

    monkeypatch.setattr(typer, "launch", interrupted)
    found = small.invoke("live", run, "--open")
    assert "http://127.0.0.1:" in found.output and str(served.server_port) not in found.output


def test_the_command_serves_without_torch_until_ctrl_c(run):
    code = "import sys; from flowrl.cli.main import main\n"
    code += "try: main()\nfinally: print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "live", run, "--port", "0"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as process:
        host, port = process.stdout.readline().split()[0].split("/")[2].split(":")
        assert b"mine" in asked((host, int(port)), "/")[1]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("False\n", "")
    assert process.returncode == 0
