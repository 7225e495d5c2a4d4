"""A reward server that dies or answers nonsense: no sample is lost, none becomes a zero.

The run stops with one sentence.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import small
import torch
from scripted_server import about, reply, request_of, scripted

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl import rewards
from flowrl.config import build
from flowrl.rewards import RewardBug, RewardUnavailable, remote
from flowrl.rewards.judge import client as judge_client
from flowrl.rewards.server import http_client
from flowrl.rewards.server.app import Server
from flowrl.rewards.server.journal import ScoreJournal
from flowrl.runtime.signals import Aborted
from flowrl.training.loop import Trainer

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


# --- a server that dies


def _serve(port):
    def slow(media, prompts, context=None):
        time.sleep(0.02 * len(prompts))
        return rewards.load("jpeg")(media, prompts)

    torch.set_num_threads(1)
    Server({"jpeg": {"reward": slow}}, port=port, device="cpu", max_batch=4).run()


@contextlib.contextmanager
def child(port):
    """A server in a process of its own: a fork, because importing torch takes seconds."""
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def killed_once(port, after):
    """A server that gets SIGKILL after so many scored samples, and is started again soon after."""
    done = threading.Event()

    def supervise():
        with child(port) as first:
            while httpx.get(f"http://127.0.0.1:{port}/health").json()["scored"] < after:
                time.sleep(0.01)
            os.kill(first.pid, signal.SIGKILL)
        killed.append(time.monotonic())
        time.sleep(0.3)
        with child(port):
            done.wait(600)

    killed = []
    thread = threading.Thread(target=supervise)
    thread.start()
    httpx.get(f"http://127.0.0.1:{port}/health")  # a start does not wait for it
    try:
        yield killed
    finally:
        done.set()
        thread.join()


@pytest.fixture
def transport(monkeypatch):
    """httpx.get waits for a server that is only starting."""
    get = httpx.get

    def patient(url):
        for _ in range(500):
            with contextlib.suppress(httpx.TransportError):
                return get(url)
            time.sleep(0.01)
        raise AssertionError(f"{url} never answered")

    monkeypatch.setattr(httpx, "get", patient)


def test_a_server_that_is_killed_and_started_again_loses_no_sample(transport, caplog):
    port, images = free_port(), torch.rand(60, 3, 16, 16)
    with killed_once(port, after=12) as killed, caplog.at_level(logging.WARNING, "flowrl"):
        reward = rewards.load("remote", url=f"http://127.0.0.1:{port}", batch=2, wait=60)
        out = reward(images, ["a cat"] * 60)
    assert killed and torch.equal(out, rewards.load("jpeg")(images, ["a cat"] * 60))
    said = [record.message for record in caplog.records if str(port) in record.message]
    assert "does not answer" in said[0]
    assert "trying again for 60 s" in said[0]
    assert "answers again" in said[-1]


def far(output, url, **changes):
    """A small training run whose reward, called jpeg, is elsewhere."""
    return small.config(
        output,
        iterations="2",
        data__eval="null",
        reward__jpeg__name="remote",
        reward__jpeg__url=url,
        **changes,
    )


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
    torch.set_num_threads(1)
    return (
        small.trainer(tmp_path_factory.mktemp("local") / "run", iterations="2", data__eval="null")
        .run()
        .path
    )


def test_a_training_run_whose_server_is_killed_meanwhile_equals_the_local_one(
    transport, local_run, tmp_path
):
    port = free_port()
    with killed_once(port, after=3) as killed:
        run = Trainer(
            far(
                tmp_path / "run",
                f"http://127.0.0.1:{port}",
                reward__jpeg__wait="60",
                reward__jpeg__batch="1",
            )
        ).run()
    assert killed and small.numbers(run.path) == small.numbers(local_run)


def test_a_training_run_whose_server_stays_dead_stops_and_resumes_as_if_nothing_had_happened(
    local_run, tmp_path
):
    dead, seen, jpeg = threading.Event(), [], rewards.load("jpeg")

    def dying(media, prompts, context=None):
        if dead.is_set() or len(seen) == 6:  # iterations have four samples each
            dead.set()
            raise RewardUnavailable("gone")
        seen.extend(prompts)
        return jpeg(media, prompts)

    journal = str(tmp_path / "run" / "scores.jsonl")
    with Server({"jpeg": {"reward": dying}}, port=0, max_batch=1, device="cpu") as server:
        changes = {
            "reward__jpeg__wait": "0",
            "reward__jpeg__batch": "1",
            "reward__jpeg__journal": journal,
            "guard__check_rewards": "false",
        }
        cfg = far(tmp_path / "run", server.url, **changes)
        with pytest.raises(
            RewardUnavailable,
            match="answered 503: gone.*then resume the run; no sample",
        ):
            Trainer(cfg).run()
        assert len(small.lines(tmp_path / "run")) == 1 and len(ScoreJournal(journal).scores) == 6
        dead.clear()
        seen.append("the seventh is let through")
        Trainer(cfg, resume=tmp_path / "run").run()
    assert small.numbers(tmp_path / "run") == small.numbers(local_run)
    assert len(seen) == 8 + 1  # none was asked for twice


@pytest.mark.parametrize("wait", [0.0, 0.5])
def test_a_server_that_stays_dead_is_one_sentence_after_the_wait(media, wait):
    with Server({"jpeg": 1.0}, port=0, device="cpu") as server:
        reward = rewards.load("remote", url=server.url, wait=wait, batch=1)
    began = time.monotonic()
    with pytest.raises(RewardUnavailable) as error:
        rewards.score(media, PROMPTS, {"remote": {"reward": reward}})
    assert wait <= time.monotonic() - began < wait + 2
    assert (
        str(error.value)
        == f"the reward server {server.url} does not answer (ConnectError: [Errno 111] Connection"
        f" refused; tried for {wait:g} s): start it with `flowrl serve`, then resume the run;"
        " no sample was counted as failed"
    )
    with pytest.raises(
        RewardUnavailable,
        match="does not answer.*start it with `flowrl serve REWARD`, or correct reward.remote.url",
    ):
        rewards.load("remote", url=server.url, wait=0)


def test_a_start_does_not_wait_for_a_server_that_is_away(monkeypatch):
    """Refused connections, and one that is taken and never answered, of servers and of judges."""
    monkeypatch.setattr(http_client, "AT_START", 0.6)
    monkeypatch.setattr(remote, "AT_START", 0.6)
    monkeypatch.setattr(judge_client, "AT_START", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as other:
            closed = f"http://127.0.0.1:{other.getsockname()[1]}"
        for url, why in ((closed, "Connection refused"), (held, "no answer within 0.6 seconds")):
            began = time.monotonic()
            with pytest.raises(
                RewardUnavailable, match=f"{url} does not answer .*{why}.* start it"
            ):
                rewards.load("remote", url=url)
            judge = rewards.load("vlm_yesno", base_url=f"{url}/v1", model="m")
            with pytest.raises(
                RewardUnavailable, match=f"{url}/v1 does not answer .*{why}.* start"
            ):
                judge.begin(Path("run"))
            assert time.monotonic() - began < 5


def test_a_run_whose_server_is_away_ends_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_policy", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
    words = ["reward=remote", f"reward.remote.url={url}", f"output={tmp_path}/run"]
    began = time.monotonic()
    result = small.invoke("train", *words)
    assert time.monotonic() - began < 10 and result.exit_code == 1
    said = " ".join(result.output.split())
    assert f"the reward server {url} does not answer (ConnectError" in said
    assert "start it with `flowrl serve REWARD`, or correct reward.remote.url" in said
    assert not (tmp_path / "run").exists()


# --- a server that answers something else


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (200, "<html>hello</html>"),
            "answered what no flowrl server of protocol 2 does: '<html>hello</html>'",
        ),
        ((200, "{}"), "answered what no flowrl server"),
        ((200, ""), "answered what no flowrl server"),
        ((404, "nothing here"), "it answered 404; is it a flowrl server?"),
        ((401, ""), "it wants a token; name the variable that holds it in token_env"),
        ((302, ""), "it answered 302; is it a flowrl server?"),
        (
            (200, about(protocol=1)),
            "it speaks protocol 1, this client 2; install one version of flowrl on both",
        ),
        ((200, about(rewards={})), 'it does not serve "jpeg"'),
    ],
)
def test_a_server_that_is_none_of_ours_is_a_sentence_at_the_start(answer, said):
    with scripted(lambda path, body: answer) as url, pytest.raises(ValueError) as error:
        rewards.load("remote", url=url, reward="jpeg", wait=5)
    assert str(error.value).startswith(f"reward.remote.url={url}: ") and said in str(error.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: (200, "<html>"), "answered what no flowrl server"),
        (
            lambda body: (200, reply(body, id="other")),
            "it answered another request than the one it was asked",
        ),
        (
            lambda body: (200, reply(body, scores=[0.5])),
            r"another request than the one it was asked \(1 scores for 4\)",
        ),
        (lambda body: (200, reply(body, scores=["0.5"] * 4)), "answered what no flowrl server"),
        (lambda body: (200, reply(body).replace("0.5", "NaN")), "answered what no flowrl server"),
        (
            lambda body: (200, reply(body, version="w")),
            "now serves other rewards or settings than when this run started",
        ),
        (lambda body: (401, ""), "it wants a token"),
        (lambda body: (413, '{"detail": "too much"}'), "it answered 413: too much"),
        (
            lambda body: (500, '{"detail": "OutOfMemoryError: no"}'),
            "it answered 500: OutOfMemoryError: no",
        ),
    ],
)
def test_garbage_in_the_middle_of_a_run_stops_it_and_gives_no_score(media, answer, said):
    with scripted(lambda path, body: answer(body) if path == "/score" else (200, about())) as url:
        reward = rewards.load("remote", url=url, wait=0)
        with pytest.raises(
            RewardUnavailable, match=f"the reward server {url} .*{said}.*resume the run"
        ):
            rewards.score(media, PROMPTS, {"remote": {"reward": reward}})


def test_a_request_that_is_refused_for_its_samples_fails_those_samples(media):
    def strict(path, body):
        if path == "/score" and "a dog" in request_of(body)["prompts"]:
            return 422, '{"detail": "no dogs"}'
        return 200, reply(body) if path == "/score" else about()

    with scripted(strict) as url:
        out = rewards.score(media, PROMPTS, {"remote": {"reward": rewards.load("remote", url=url)}})
    assert out.valid.tolist() == [True, False, True, True]
    assert "the reward server refused a request: no dogs" in out.errors[0]


@pytest.mark.parametrize("status", [503, 429, 408])
def test_a_busy_server_is_asked_again_until_it_answers(media, status):
    asked = []

    def busy(path, body):
        asked.append(path)
        return (
            (status, "busy")
            if len(asked) % 3
            else (200, reply(body) if path == "/score" else about())
        )

    with scripted(busy) as url:
        assert rewards.load("remote", url=url, wait=30)(media, PROMPTS).tolist() == [0.5] * 4
    assert asked == ["/version"] * 3 + ["/score"] * 3


def test_a_server_that_hangs_is_given_up_after_timeout_and_wait(media):
    leave = threading.Event()

    def hang(path, body):
        if path == "/score":
            leave.wait(20)
        return 200, about()

    with scripted(hang) as url:
        reward = rewards.load("remote", url=url, timeout=0.3, wait=0.1, batch=1, concurrency=2)
        began = time.monotonic()
        with pytest.raises(
            RewardUnavailable, match=r"does not answer \(ReadTimeout: .*tried for 0.1 s\)"
        ):
            reward(media, PROMPTS)
        assert time.monotonic() - began < 3
        leave.set()


# --- a bug, a drip, an end


def test_a_bug_of_the_served_reward_is_told_at_once(media):
    with Server({"liar": lambda m, p, c: torch.zeros(7)}, port=0, device="cpu") as server:
        reward = rewards.load("remote", url=server.url, wait=300, batch=1)
        began = time.monotonic()
        with pytest.raises(
            RewardBug,
            match=(
                f'that {server.url} serves has a fault: reward "liar" returned a float32 tensor of'
                " shape"
            ),
        ):
            rewards.score(media, PROMPTS, {"remote": {"reward": reward}})
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "start",
    ["HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"],
    ids=["head", "body"],
)
def test_a_reply_that_drips_is_given_up_after_the_timeout_of_the_whole_request(media, start):
    leave = threading.Event()

    def drip(file):
        file.write(start.encode())
        while not leave.wait(0.05):
            file.write(b"x")

    with scripted(lambda path, body: (200, drip if path == "/score" else about())) as url:
        reward = rewards.load("remote", url=url, timeout=0.4, wait=0, batch=1)
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"does not answer \(ReadTimeout: "):
            reward(media, PROMPTS)
        assert time.monotonic() - began < 2
        leave.set()


def test_a_reply_without_end_is_not_collected(media, monkeypatch):
    monkeypatch.setattr(remote, "MOST_REPLY", 2**20)
    with scripted(lambda path, body: (200, "x" * 2**21 if path == "/score" else about())) as url:
        reward = rewards.load("remote", url=url, wait=5)
        with pytest.raises(
            RewardUnavailable,
            match="its answer is longer than 1,048,576 bytes, which no flowrl server sends",
        ):
            reward(media, PROMPTS)


@pytest.fixture
def hanging(media):
    """(address of a server that never answers but for a cat, its /score requests)."""
    leave, asked = threading.Event(), []

    def hang(path, body):
        if path != "/score":
            return 200, about()
        asked.append(request_of(body)["prompts"])
        if asked[-1] == ["a cat"]:
            return 200, reply(body, version="w")
        leave.wait(20)
        return 200, reply(body)

    with scripted(hang) as url:
        yield url, asked
        leave.set()


def test_a_signal_waits_for_no_request_and_those_that_were_not_sent_stay_unsent(media, hanging):
    url, asked = hanging
    reward = rewards.load("remote", url=url, batch=1, concurrency=2)  # timeout 600, wait 300

    def abort(number, frame):
        raise Aborted

    before = signal.signal(signal.SIGALRM, abort)
    try:
        for prompts in (["a dog"], ["a dog"] * 4):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            began = time.monotonic()
            with pytest.raises(Aborted):
                rewards.score(media[: len(prompts)], prompts, {"remote": {"reward": reward}})
            assert time.monotonic() - began < 2
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(3 * http_client.GLANCE)
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("remote", "request")) and not thread.daemon
    ]  # none to wait for
    assert len(asked) == 3


def test_when_one_request_gives_up_for_all_its_reason_is_the_one_that_is_told(media, hanging):
    reward = rewards.load("remote", url=hanging[0], batch=1)
    began = time.monotonic()
    with pytest.raises(RewardUnavailable, match="it now serves other rewards or settings"):
        reward(media, ["a dog", "a dog", "a cat", "a dog"])
    assert time.monotonic() - began < 2
