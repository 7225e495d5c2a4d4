"""Several servers of one reward: requests are balanced, and one that is away is passed over."""

import logging

import pytest
import torch
from scripted_server import about, reply, scripted

from flowrl import rewards

PROMPTS = [f"prompt {k}" for k in range(24)]


def answering(asked, ends=None, **changes):
    """A server that counts its requests, and after `ends` of them says that it is busy."""

    def answer(path, body):
        asked.append(path)
        if ends is not None and len(asked) > ends:
            return 503, "busy"
        return 200, about(**changes) if path == "/version" else reply(body)

    return answer


def test_requests_are_balanced_over_servers():
    first, second = [], []
    with scripted(answering(first)) as a, scripted(answering(second)) as b:
        reward = rewards.load("remote", url=[a, b], batch=1, concurrency=4)
        assert reward(torch.rand(24, 3, 8, 8), PROMPTS).tolist() == [0.5] * 24
    assert len(first) + len(second) == 24 + 2
    assert min(len(first), len(second)) >= 8


def test_a_server_that_is_away_is_passed_over_with_one_sentence(caplog):
    first, second = [], []
    with scripted(answering(first, ends=3)) as a, scripted(answering(second)) as b:
        reward = rewards.load("remote", url=[a, b], batch=1, concurrency=1, wait=30)
        with caplog.at_level(logging.WARNING, "flowrl"):
            assert reward(torch.rand(24, 3, 8, 8), PROMPTS).tolist() == [0.5] * 24
    assert len(first) == 4 and len(second) == 1 + 22  # one was refused, and asked of the other
    (said,) = [record.message for record in caplog.records]
    assert f"the reward server {a} does not answer (it answered 503" in said
    assert "others are asked meanwhile" in said


def test_servers_of_other_rewards_are_refused():
    with (
        scripted(answering([])) as a,
        scripted(answering([], version="w")) as b,
        pytest.raises(ValueError, match=f"{b} serves other rewards or settings than {a}"),
    ):
        rewards.load("remote", url=[a, b])


def test_a_request_keeps_to_what_the_smallest_server_takes():
    with scripted(answering([])) as a, scripted(answering([], max_samples=2)) as b:
        assert rewards.load("remote", url=[a, b]).about.max_samples == 2


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:1", "http://127.0.0.1:1"]])
def test_no_address_and_one_written_twice_are_a_sentence(urls):
    with pytest.raises(ValueError, match="write each address once"):
        rewards.load("remote", url=urls)
