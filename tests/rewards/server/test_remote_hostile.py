"""Servers that answer too much, for ever, or nonsense, and passwords in addresses."""

import json
import logging
import threading
import time

import pytest
import small
import torch
from scripted_server import about, reply, scripted

from flowrl import rewards
from flowrl.rewards import RewardUnavailable
from flowrl.rewards.server.addresses import address, located
from flowrl.rewards.server.http_client import Again, Client, TooLong

PROMPTS = ["a cat"]
MEDIA = torch.zeros(1, 3, 8, 8)


def serving(answer):
    """A server of answer(body) at /score."""
    return scripted(lambda path, body: answer(body) if path == "/score" else (200, about()))


def requests():
    """Threads that ask a server."""
    return {thread for thread in threading.enumerate() if thread.name == "request"}


def no_thread_left(before):
    """None but those that another test left."""
    deadline = time.monotonic() + 5
    while requests() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- answers


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "0", "1e300", '"512"', "null", "1e7"])
@pytest.mark.parametrize("field", ["max_mb", "max_samples"])
def test_limits_that_are_none_are_refused_at_the_start(field, value):
    record = about(**{field: 1234.5}).replace("1234.5", value)
    with (
        scripted(lambda path, body: (200, record)) as url,
        pytest.raises(ValueError, match="answered what no flowrl server of protocol 2 does"),
    ):
        rewards.load("remote", url=url, wait=0)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 102 Processing\r\nX: " + b"x" * 1000 + b"\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x"),
    ],
    ids=["continue", "processing", "head", "body"],
)
def test_an_answer_that_never_ends_is_given_up_with_its_connection_and_its_thread(head, piece):
    def endless(file):
        file.write(head)
        while True:  # until the client has gone
            file.write(piece)
            time.sleep(0.01)

    with serving(lambda body: (200, endless)) as url:
        reward = rewards.load("remote", url=url, timeout=0.4, wait=0)
        began, before = time.monotonic(), requests()
        with pytest.raises(RewardUnavailable, match=r"does not answer \(ReadTimeout: "):
            reward(MEDIA, PROMPTS)
        assert time.monotonic() - began < 2
        no_thread_left(before)


@pytest.mark.parametrize("status", [500, 503, 413, 404, 422])
@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_long_error_texts_are_cut_and_shown_without_control_characters(status, size):
    said = json.dumps({"detail": "\x1b[31mno\n" * (size // 8)})
    with serving(lambda body: (status, said)) as url:
        reward = rewards.load("remote", url=url, wait=0)
        with pytest.raises((RewardUnavailable, ValueError)) as error:
            reward(MEDIA, PROMPTS)
    text = str(error.value)
    assert len(text) < 700 and "\x1b" not in text and "\n" not in text
    assert ("\\x1b[31mno" in text) == (size == 10_000)


def test_long_errors_of_samples_are_cut():
    def fails(body):
        return 200, reply(body, scores=[None], errors=["no" * 10**6])

    with serving(fails) as url:
        reward = rewards.load("remote", url=url)
        assert reward(MEDIA, PROMPTS).isnan().all()
    assert len(str(reward.problem)) < 400


def test_an_answer_of_many_small_values_is_not_parsed():
    with serving(lambda body: (200, "[" + "{}," * 1_000_000 + "0]")) as url:
        reward = rewards.load("remote", url=url, wait=0)
        with pytest.raises(RewardUnavailable, match="3,000,003 bytes holds too many values"):
            reward(MEDIA, PROMPTS)


@pytest.mark.parametrize("after", ["nan", "inf", "-5", "1e400", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_retry_after_of_any_kind_keeps_to_the_wait(after):
    def busy(file):
        head = f"HTTP/1.1 503 Busy\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n"
        file.write(head.encode())

    with serving(lambda body: (503, busy)) as url:
        reward = rewards.load("remote", url=url, wait=0.2)
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match="it answered 503"):
            reward(MEDIA, PROMPTS)
        assert time.monotonic() - began < 2


def test_a_client_is_used_again_after_an_answer_and_not_after_a_failure():
    with scripted(lambda path, body: (200, "x" * (5000 if path == "/long" else 5))) as url:
        client = Client(url, timeout=5, largest=1000)
        assert client.fetch("GET", "/").text == client.fetch("GET", "/").text == "xxxxx"
        assert len(client.idle) == 1
        with pytest.raises(TooLong, match="longer than 1,000 bytes"):
            client.fetch("GET", "/long")
        assert not client.idle
    with pytest.raises(Again):
        client.fetch("GET", "/")


# --- passwords


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@host:1", "https://host/?token=hunter2", "http://hunter2@host"]
)
def test_an_address_with_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(
        ValueError, match=r"remote.*url=.*may hold no password.*env:SERVER_URL"
    ) as e:
        rewards.load("remote", url=url)
    assert "hunter2" not in str(e.value)


def test_a_run_with_a_password_in_an_address_stops_before_its_config_is_written(tmp_path):
    words = {"reward__jpeg__name": "remote", "reward__jpeg__url": "http://me:hunter2@127.0.0.1:1"}
    with pytest.raises(ValueError, match="may hold no password"):
        small.trainer(tmp_path / "run", **words).run()
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_address_of_the_environment_may_hold_a_password_which_stays_there(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    seen = []

    def answer(path, body):
        seen.append(path)
        return 200, reply(body) if path.startswith("/score") else about()

    with scripted(answer) as url:
        secret = url.replace("//", "//me:hunter2@") + "/?token=hunter3"
        monkeypatch.setenv("MY_SERVER", secret)
        reward = rewards.load("remote", url="env:MY_SERVER", wait=0)
        assert reward(MEDIA, PROMPTS).tolist() == [0.5]
    with pytest.raises(RewardUnavailable, match=f"the reward server {url} does not answer") as e:
        reward(MEDIA, PROMPTS)
    assert seen == ["/version?token=hunter3", "/score?token=hunter3"]
    assert reward.settings.model_dump()["url"] == "env:MY_SERVER"
    assert "hunter" not in caplog.text + str(e.value) + repr(reward)


def test_where_an_address_leads(monkeypatch):
    monkeypatch.setenv("MY_SERVER", "https://me:a%2Fb@host:8321/api/?key=1")
    found = located("env:MY_SERVER", "http://HOST")
    assert (found.shown, found.login, found.query) == (
        "https://host:8321/api",
        ("me", "a/b"),
        "key=1",
    )
    assert "a/b" not in repr(found) and "key" not in repr(found)
    assert address("http://host:1/", "http://HOST") == "http://host:1"
    for value, said in (
        ("env:NOTHING", "variable NOTHING is empty or not set.*as http://HOST"),
        ("http://host:99999999", "write http://HOST"),
    ):
        with pytest.raises(ValueError, match=said):
            address(value, "http://HOST")


def test_a_login_and_a_token_together_are_refused(monkeypatch):
    monkeypatch.setenv("MY_SERVER", "http://me:hunter2@127.0.0.1:1")
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-20-chars")
    with pytest.raises(ValueError, match="only one of them can be sent"):
        rewards.load("remote", url="env:MY_SERVER", token_env="MY_TOKEN")
