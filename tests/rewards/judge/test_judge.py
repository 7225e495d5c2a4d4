"""The client of judges, against a scripted server: order, retries, stops, the budget, the log."""

import json
import logging
import math
import socket
import threading
import time
from email.utils import formatdate

import pytest
import torch
from judge_server import Answer, pictures, serving, words
from PIL import Image

from flowrl.data.media import to_pil
from flowrl.rewards import RewardUnavailable
from flowrl.rewards.judge import client
from flowrl.rewards.judge.client import JudgeClient, NoReply, Settings, picture, text
from flowrl.rewards.judge.completion import read_reply
from flowrl.rewards.judge.replies import final_score, yes_share
from flowrl.rewards.judge.reward import user

ONE = [user(text("How good?"))]


def judge(server, *, fields=None, **more):
    return JudgeClient(
        Settings(model="the-model", **server.settings(**more)), reward="some", fields=fields
    )


def score(reply):
    return final_score(reply.text)


def ask(server, count=1, **more):
    return judge(server, **more).ask_all(
        [[user(text(f"question {i}"))] for i in range(count)], score
    )


# --- requests and order


def test_replies_come_in_the_order_asked_and_at_most_concurrency_at_once():
    def script(body, n):
        i = int(words(body).split()[1])
        slow = 0.06 if i == 0 else 0.01  # the first is the slowest
        return Answer(f"Final Score: {1 + i % 5}", delay=slow)

    with serving(script) as server:
        out = ask(server, 12, concurrency=3)
    assert out == [1.0 + i % 5 for i in range(12)]
    assert 1 < server.peak <= 3 and len(server.requests) == 12


def test_a_request_holds_the_settings_and_no_key_unless_one_is_named(monkeypatch):
    monkeypatch.setenv("MY_KEY", " secret\n")
    with serving("Final Score: 3") as server:
        ask(
            server,
            temperature=0.5,
            max_tokens=7,
            extra={"seed": 3, "top_p": 0.9, "max_tokens": None, "max_completion_tokens": 8},
        )
        ask(server, api_key_env="MY_KEY", fields={"logprobs": True})
    first, second = server.requests
    assert server.paths == ["/v1/chat/completions"] * 2 and server.keys == [None, "Bearer secret"]
    said = {
        "model": "the-model",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "question 0"}]}],
        "temperature": 0.5,
    }
    assert first == {**said, "seed": 3, "top_p": 0.9, "max_completion_tokens": 8}
    assert second["logprobs"] is True and "seed" not in second


def test_pictures_arrive_without_loss():
    media = torch.rand(1, 3, 20, 30)
    image = to_pil(media)[0]
    with serving("Final Score: 3") as server:
        judge(server).ask_all([[user(picture(image), text("a"), picture(image, side=16))]], score)
    whole, small = pictures(server.requests[0])
    assert list(whole.getdata()) == list(image.getdata()) and whole.mode == "RGB"
    assert small.size == (16, 11)


def test_the_same_question_is_asked_once_while_its_reply_is_kept(monkeypatch):
    with serving(lambda body, n: f"Final Score: {n + 1}") as server:
        one = judge(server)
        assert one.ask_all([ONE], score) == one.ask_all([ONE], score) == [1.0]
        assert len(server.requests) == 1
        monkeypatch.setattr(client, "KEPT", 0)
        fresh = judge(server)
        assert fresh.ask_all([ONE], score) == [2.0] and fresh.ask_all([ONE], score) == [3.0]
    assert one.used == 10 and fresh.used == 20


def test_where_nothing_may_come_from_earlier_replies_every_question_is_asked():
    with serving(lambda body, n: f"Final Score: {n + 1}") as server:
        one = judge(server)
        assert one.ask_all([ONE], score) == [1.0]
        with one.uncached():
            assert one.ask_all([ONE], score) == [2.0] and one.ask_all([ONE], score) == [3.0]
        assert one.ask_all([ONE], score) == [3.0] and len(server.requests) == 3


def test_a_reply_that_could_not_be_read_is_not_kept():
    with serving(lambda body, n: "nothing" if n == 0 else "Final Score: 2") as server:
        one = judge(server)
        assert isinstance(one.ask_all([ONE], score)[0], NoReply)
        assert one.ask_all([ONE], score) == [2.0]


# --- retries


@pytest.mark.parametrize(
    "broken",
    [
        Answer(status=500, raw=b"oops"),
        Answer(status=503, raw=b'{"error": {"message": "loading"}}'),
        Answer(status=429, raw=b"{}"),
        Answer(status=408, raw=b""),
        Answer(raw=b"<html>a proxy</html>"),
        Answer(raw=b""),
        Answer(raw=b"\xff\xfe"),
        Answer(raw=b'{"choices": []}'),
        Answer(raw=b"[]"),
        Answer(raw=b'{"choices": [{"message": null}]}'),
        Answer(raw=b'{"choices": [{"message": {"content": 5}}]}'),
        Answer("Final Score: 1", delay=0.6),
    ],
)
def test_a_passing_trouble_is_asked_again(broken):
    with serving(lambda body, n: broken if n < 2 else "Final Score: 4") as server:
        assert ask(server, timeout=0.3) == [4.0]
    assert len(server.requests) == 3


def test_the_pauses_double_and_retry_after_is_honoured():
    past = formatdate(time.time() - 60)
    asked = [{"Retry-After": "0"}, {}, {"Retry-After": "0.3"}, {"Retry-After": past}, {}]
    times, after = [], iter(asked)

    def script(body, n):
        times.append(time.monotonic())
        return Answer("Final Score: 4", status=200 if n == 4 else 503, headers=next(after))

    with serving(script, pause=0.02) as server:
        assert ask(server, retries=4) == [4.0]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert gaps[0] >= 0.02 and gaps[1] >= 0.04  # "at once" is not believed of a server that is busy
    # the server's 0.3 and not the pause of 0.08; for a date that has passed the pause
    assert gaps[2] >= 0.3 and gaps[3] >= 0.16


def test_a_server_that_wants_an_hour_is_taken_to_be_gone():
    with (
        serving(Answer(status=429, headers={"Retry-After": "3600"}, raw=b"{}")) as server,
        pytest.raises(RewardUnavailable) as error,
    ):
        ask(server)
    assert "429" in str(error.value)
    assert "asks to wait 3600 seconds" in str(error.value)
    assert len(server.requests) == 1


def test_the_timeout_is_that_of_the_whole_reply_not_of_its_pieces():
    """Ten bytes in two seconds, each of them in time for a timeout of 0.3 seconds."""
    over = threading.Event()

    def trickle():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
            for _ in range(10):
                if over.wait(0.2):
                    break
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        settings = Settings(
            model="m",
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1",
            timeout=0.3,
            retries=0,
        )
        start = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"no answer within timeout=0\.3 seconds"):
            JudgeClient(settings, reward="some").ask_all([ONE], score)
        assert time.monotonic() - start < 1.5
        over.set()
        thread.join()


def test_a_reply_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 1000)
    with (
        serving(Answer("Final Score: 4" + " " * 2000)) as server,
        pytest.raises(RewardUnavailable, match="longer than 1,000 bytes"),
    ):
        ask(server)


def test_a_server_that_answers_nothing_stops_the_run_with_a_sentence():
    with (
        serving(Answer(raw=b"<html>garbage</html>")) as server,
        pytest.raises(RewardUnavailable) as error,
    ):
        ask(server, 3)
    said = str(error.value)
    assert server.url in said and "answered none of 3 questions" in said
    assert "something that is not a chat completion: '<html>garbage</html>' (3 tries)" in said


def test_a_server_that_is_not_there_stops_the_run_with_a_sentence():
    with serving("") as server:
        pass
    with pytest.raises(
        RewardUnavailable, match="answered none of 2 questions: ConnectError.*3 tries"
    ):
        ask(server, 2)


def test_a_sample_that_breaks_the_server_fails_alone(caplog):
    def script(body, n):
        return (
            Answer(status=500, raw=b'{"error": "bad picture"}')
            if words(body) == "question 1"
            else "Final Score: 4"
        )

    with serving(script) as server, caplog.at_level(logging.WARNING, logger="flowrl"):
        out = ask(server, 3)
    assert out[0] == out[2] == 4.0
    assert isinstance(out[1], NoReply)
    assert "500 bad picture (3 tries)" in str(out[1])
    assert "some: 1 of 3 questions failed; first: it answers 500 bad picture" in caplog.text


# --- what no retry would help


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_stops_at_once_and_is_not_shown(status, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with serving(
        Answer(status=status, raw=b'{"error": {"message": "bad key sk-secret"}}')
    ) as server:
        with pytest.raises(RewardUnavailable) as error:
            ask(server, 50, api_key_env="MY_KEY", concurrency=2)
        assert f"refuses the API key in the environment variable MY_KEY ({status})" in str(
            error.value
        )
        assert "sk-secret" not in str(error.value)
        with pytest.raises(
            RewardUnavailable,
            match=r"refuses a request without an API key.*reward\.some\.api_key_env",
        ):
            ask(server)
    assert len(server.requests) < 10


def test_an_unknown_model_is_answered_with_those_that_there_are():
    missing = Answer(status=404, raw=b'{"error": {"message": "The model `x` does not exist."}}')
    with serving(missing) as server:
        with pytest.raises(
            RewardUnavailable,
            match=r"has no model other \(404\); set reward\.some\.model .* serves: the-model",
        ):
            JudgeClient(Settings(model="other", **server.settings()), reward="some").ask_all(
                [ONE], score
            )
        with pytest.raises(
            RewardUnavailable,
            match=(
                r"no OpenAI-compatible API there \(404\); reward\.some\.base_url usually ends"
                r" in /v1"
            ),
        ):
            ask(server, base_url=server.url.removesuffix("/v1"))


def test_a_status_that_no_retry_would_help_is_not_retried():
    with (
        serving(Answer(status=409, raw=b"")) as server,
        pytest.raises(RewardUnavailable, match="answers 409"),
    ):
        ask(server)
    assert len(server.requests) == 1


def test_a_request_that_is_too_large_says_its_size_and_fails_alone():
    image = Image.effect_noise((300, 300), 100).convert("RGB")

    def script(body, n):
        return Answer(status=413, raw=b"") if len(pictures(body)) == 2 else "Final Score: 4"

    with serving(script) as server:
        out = judge(server).ask_all([[user(*[picture(image)] * count)] for count in (1, 2)], score)
    assert out[0] == 4.0 and len(server.requests) == 2  # not tried again
    assert "a request of 0.3 MiB with 2 pictures too large (413)" in str(out[1])
    assert "reward.some.side=512" in str(out[1])


def test_a_wrong_request_repeats_the_servers_words():
    with serving(
        Answer(status=400, raw=b'{"error": {"message": "context length\\nexceeded"}}')
    ) as server:
        out = ask(server)
    assert str(out[0]) == "the server refuses the request (400): context length exceeded"
    assert len(server.requests) == 1
    with (
        serving(Answer(status=302, raw=b"", headers={"Location": "/login"})) as server,
        pytest.raises(RewardUnavailable, match="answers 302"),
    ):
        ask(server)


def test_one_fatal_answer_ends_the_others_without_waiting_for_them():
    release = threading.Event()

    def script(body, n):
        if words(body) == "question 0":
            release.wait(3)
        return Answer(status=401, raw=b"")

    with serving(script) as server:
        start = time.monotonic()
        with pytest.raises(RewardUnavailable):
            ask(server, 2)
        assert time.monotonic() - start < 1.0
        release.set()


# --- the budget


def test_a_spent_budget_stops_the_run_and_says_so(monkeypatch):
    monkeypatch.setattr(client, "KEPT", 0)
    with serving(Answer("Final Score: 4", tokens=60)) as server:
        one = judge(server, token_budget=100, concurrency=1)
        assert one.ask_all([ONE], score) == [4.0] and one.used == 60
        with pytest.raises(
            RewardUnavailable,
            match=r"used 120 tokens, and token_budget=100; raise reward\.some\.token_budget",
        ):
            one.ask_all([ONE] * 5, score)
    assert len(server.requests) == 2


def test_a_budget_needs_a_server_that_counts():
    with serving(Answer("Final Score: 4", tokens=None)) as server:
        assert ask(server) == [4.0]
        with pytest.raises(RewardUnavailable, match="does not say how many tokens a reply used"):
            ask(server, token_budget=100)


# --- dialogues, the log


def test_dialogues_run_side_by_side_and_the_log_holds_every_turn(tmp_path):
    def dialogue(name, ask):
        messages = [user(text(name))]
        first = ask(messages).text
        messages += [{"role": "assistant", "content": first}, user(text(f"and {name} again?"))]
        return final_score(ask(messages).text)

    def script(body, n):
        return (
            "I must think"
            if len(body["messages"]) == 1
            else "Final Score: 2"
            if "ann" in words(body)
            else "I will not say — nö"
        )

    log = tmp_path / "logs" / "judge.jsonl"
    with serving(script) as server:
        one = judge(server, log=str(log))
        out = one.run([lambda ask, name=name: dialogue(name, ask) for name in ("ann", "bob")])
        one.ask_all(
            [[user(picture(Image.new("RGB", (8, 8))), text("a picture"))]], lambda reply: reply.text
        )
    assert out[0] == 2.0 and "Final Score" in str(out[1])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    if rows[0]["question"] == "bob":  # who is done first is written first
        rows = rows[2:4] + rows[:2] + rows[4:]
    assert [(row["turn"], row["question"], row["reply"], row["value"]) for row in rows] == [
        (0, "ann", "I must think", None),
        (1, "and ann again?", "Final Score: 2", 2.0),
        (0, "bob", "I must think", None),
        (1, "and bob again?", "I will not say — nö", None),
        (0, "<image>a picture", "I must think", "I must think"),
    ]
    assert rows[3]["error"].startswith('no number after "Final Score:"')
    assert all(row["error"] is None for row in rows if row is not rows[3])


def test_replies_that_were_paid_are_in_the_log_even_if_the_call_breaks_down(tmp_path):
    def script(body, n):
        return "Final Score: 4" if words(body) == "question 0" else Answer(status=401, raw=b"")

    log = tmp_path / "judge.jsonl"
    with serving(script) as server, pytest.raises(RewardUnavailable):
        ask(server, 2, concurrency=1, log=str(log))
    assert [
        (row["question"], row["value"]) for row in map(json.loads, log.read_text().splitlines())
    ] == [("question 0", 4.0)]


def test_tokens_that_read_alike_add_up():
    """Yes -0.05, No -3, Yes -9: (e^-0.05 + e^-9) / (e^-0.05 + e^-9 + e^-3) = 0.9503."""
    top = [
        {"token": token, "logprob": logprob}
        for token, logprob in (("Yes", -0.05), ("No", -3), ("Yes", -9), ("No", math.nan))
    ]
    choice = {"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": top}]}}
    assert yes_share(read_reply({"choices": [choice]}).first) == pytest.approx(0.9503, abs=1e-4)


def test_a_reply_that_max_tokens_cut_says_so():
    with serving(Answer("Let me see", finish="length")) as server:
        assert "(the reply was cut at max_tokens=4096)" in str(ask(server)[0])


def test_a_mistake_in_the_program_is_not_taken_for_a_failed_reply():
    with serving("Final Score: 4") as server, pytest.raises(ZeroDivisionError):
        judge(server).ask_all([ONE], lambda reply: 1 / 0)


# --- settings


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://host/v1", "http://", "", "http://host:port/v1"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="write http://HOST:PORT/v1"):
        Settings(model="m", base_url=url)


def test_a_missing_key_and_a_log_that_cannot_be_written_are_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(
        ValueError,
        match=r"reward\.some\.api_key_env=NO_KEY: the environment variable NO_KEY holds no API key",
    ):
        JudgeClient(Settings(model="m", api_key_env="NO_KEY"), reward="some")
    for key in ("sk-secret\nsecond", "sk-secret second", "sk-sécret"):
        monkeypatch.setenv("ODD_KEY", key)
        with pytest.raises(
            ValueError, match="ODD_KEY holds spaces, line breaks or characters outside ASCII"
        ) as error:
            JudgeClient(Settings(model="m", api_key_env="ODD_KEY"), reward="some")
        assert "cret" not in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"reward\.some\.log=.*cannot be written"):
        JudgeClient(Settings(model="m", log=str(tmp_path / "file" / "log.jsonl")), reward="some")


def test_nothing_is_sent_for_no_questions():
    with serving("Final Score: 4") as server:
        assert judge(server).ask_all([], score) == [] and server.requests == []
    assert client.said({"content": "plain"}) == "plain"
