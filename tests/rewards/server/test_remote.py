"""The remote reward: the scores of the server bit for bit, its journal, its settings.

When the server dies: test_remote_dead.py.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl import rewards
from flowrl.rewards import RewardUnavailable
from flowrl.rewards.remote import Remote
from flowrl.rewards.server.app import Server
from flowrl.rewards.server.journal import ScoreJournal
from flowrl.shapes.prompts import all_prompts
from flowrl.types import MediaContext

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]


def brightness(media, prompts, context=None):
    return media.flatten(1).mean(1)


def serving(spec, **options):
    return Server(spec, port=0, device="cpu", **options)


def remote(server, **settings):
    return rewards.load("remote", url=server.url, **{"wait": 0.0, **settings})


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


# --- scores


@pytest.mark.parametrize(
    "settings", [{}, {"batch": 1, "concurrency": 3}, {"batch": 3, "concurrency": 1}]
)
def test_scores_equal_local_ones_bit_for_bit(settings):
    prompts = list(all_prompts()[:6])
    texts, context = [prompt["prompt"] for prompt in prompts], MediaContext(meta=prompts)
    images = torch.cat([torch.rand(3, 3, 64, 64), torch.randint(0, 256, (3, 3, 64, 64)) / 255])
    chosen = {"jpeg": 0.3, "shapes": 1.0, "light": {"reward": brightness, "weight": -2.0}}
    local = rewards.score(images, texts, chosen, context)
    with serving(chosen) as server:
        assert torch.equal(remote(server, **settings)(images, texts, context), local.total)
        for label in chosen:
            assert torch.equal(
                remote(server, reward=label, **settings)(images, texts, context), local.raw[label]
            )


def test_videos_are_scored_too(media):
    video = torch.rand(3, 2, 3, 8, 8)
    with serving({"jpeg": 1.0}) as server:
        for clip in (video, (video * 255).round() / 255):
            assert torch.equal(
                remote(server)(clip, PROMPTS[:3]), rewards.load("jpeg")(clip, PROMPTS[:3])
            )


class Bytes(rewards.Reward):
    """Rounds, and says so."""

    name, scale = "bytes", "mean of the bytes"

    class Settings(rewards.Settings):
        rounding: bool = True

    def __call__(self, media, prompts, context=None):
        return ((media * 255).round() / 255 if self.settings.rounding else media).flatten(1).mean(1)


def test_bytes_are_sent_where_the_reward_rounds_or_the_user_says_so(media):
    sent = []
    with serving(
        {"rounds": {"reward": Bytes()}, "reads": {"reward": Bytes(Bytes.Settings(rounding=False))}}
    ) as server:
        unpack = server.service.job
        server.service.job = lambda question: sent.append(question.media) or unpack(question)
        assert torch.equal(remote(server, reward="rounds")(media, PROMPTS), Bytes()(media, PROMPTS))
        assert torch.equal(remote(server, reward="reads")(media, PROMPTS), media.flatten(1).mean(1))
        assert torch.equal(
            remote(server, reward="reads", pixels="bytes")(media, PROMPTS), Bytes()(media, PROMPTS)
        )
    assert [media.dtype for media in sent] == [torch.uint8, torch.float32, torch.uint8]


def test_it_adopts_what_the_server_states():
    with serving({"shapes": 1.0, "jpeg": {"quality": 80}}) as server:
        total, jpeg = remote(server), remote(server, reward="jpeg")
    assert (total.needs, total.reads, total.name) == ({"meta"}, {"include"}, "remote")
    assert total.scale.startswith("1 x shapes (0 to 1")
    assert jpeg.scale == "minus kilobytes at JPEG quality 80, divided by 500"
    assert (jpeg.needs, jpeg.reads, jpeg.reads_prompt, jpeg.video, jpeg.differentiable) == (
        set(),
        set(),
        False,
        "yes",
        False,
    )


def test_groups_stay_whole(media):
    seen = []

    def rank(media, prompts, context):
        seen.append(context.group.tolist())
        return torch.cat(
            [
                brightness(media, prompts)[context.group == g].argsort().argsort().float()
                for g in context.group.unique()
            ]
        )

    rank.needs = {"group"}
    group = torch.tensor([3, 3, 3, 1, 1, 2, 2, 2])
    images, texts = torch.rand(8, 3, 8, 8), ["a"] * 8
    with serving({"rank": rank}) as server:
        out = remote(server, batch=4, concurrency=1)(images, texts, MediaContext(group=group))
    assert seen == [[3, 3, 3], [1, 1], [2, 2, 2]] or seen == [[3, 3, 3], [1, 1, 2, 2, 2]]
    assert out.tolist() == [
        v
        for rows in (slice(0, 3), slice(3, 5), slice(5, 8))
        for v in brightness(images[rows], 0).argsort().argsort()
    ]


def test_requests_keep_to_what_the_server_takes():
    seen, images = [], torch.rand(8, 3, 128, 128)  # 197 kB each

    def sizes(media, prompts, context=None):
        seen.append(len(prompts))
        return brightness(media, prompts)

    with serving({"sizes": sizes}, max_mb=1.0, max_batch=1) as server:
        reward = remote(server, wait=60.0)  # a busy machine may have to ask twice
        assert torch.equal(reward(images, ["a"] * 8), brightness(images, 0))
    assert sum(seen) == 8 and max(seen) == 4


def test_a_sample_that_fails_is_nan_with_the_servers_message_and_never_zero(media):
    def picky(media, prompts, context=None):
        if "a dog" in prompts:
            raise OSError("no dogs")
        return brightness(media, prompts)

    with serving({"picky": picky}) as server:
        reward = remote(server)
        out = reward(media, PROMPTS)
        assert out.isnan().tolist() == [False, True, False, False]
        assert torch.equal(out[[0, 2, 3]], brightness(media, 0)[[0, 2, 3]])
        assert reward.problem.startswith("sample 1: picky: OSError: no dogs")
        assert reward(media[:1], PROMPTS[:1]).isfinite().all() and reward.problem is None


def test_many_clients_at_once_lose_duplicate_and_mix_nothing():
    """16 clients of 20 pictures, each its own picture and prompt.

    scripts/bench/server.py asks with 64 clients of 200.
    """
    images = torch.rand(16, 20, 3, 8, 8)
    with serving({"light": brightness, "jpeg": 1.0}) as server:

        def client(number):
            reward = remote(server, reward="light", batch=1, concurrency=2)
            return reward(images[number], [f"picture {number} {i}" for i in range(20)])

        with ThreadPoolExecutor(16) as pool:
            out = torch.stack(list(pool.map(client, range(16))))
        assert server.service.scored == 320
    assert torch.equal(out, brightness(images.flatten(0, 1), 0).view(16, 20))
    assert len(set(out.flatten().tolist())) == 320


# --- the journal


def test_what_the_journal_holds_is_not_asked_for_again(media, tmp_path):
    path = str(tmp_path / "scores.jsonl")
    with serving({"light": brightness, "jpeg": 1.0}) as server:
        first = remote(server, reward="light", journal=path)(media, PROMPTS)
        assert server.service.scored == 4
        again = remote(server, reward="light", journal=path)
        assert torch.equal(again(media, PROMPTS), first) and server.service.scored == 4
        assert torch.equal(
            again(torch.cat([media[2:], 1 - media[:1]]), [*PROMPTS[2:], "new"])[:2], first[2:]
        )
        assert server.service.scored == 5  # only the new one
        other = remote(server, reward="jpeg")
        other.journal = ScoreJournal(path)  # as the owner of a run gives it
        assert torch.equal(other(media, PROMPTS), rewards.load("jpeg")(media, PROMPTS))
        assert server.service.scored == 9


def test_scores_received_before_the_server_died_are_kept(media, tmp_path):
    path, dead = str(tmp_path / "scores.jsonl"), threading.Event()
    dead.set()

    def dying(media, prompts, context=None):
        if dead.is_set() and "two red circles" in prompts:
            raise RewardUnavailable("my own server is gone")
        return brightness(media, prompts)

    with serving({"dying": dying}) as server:
        reward = remote(server, journal=path, batch=1, concurrency=1)
        with pytest.raises(RewardUnavailable, match="answered 503: my own server is gone"):
            rewards.score(media, PROMPTS, {"remote": {"reward": reward}})
        assert len(ScoreJournal(path).scores) == 2
        dead.clear()
        before = server.service.scored
        out = remote(server, journal=path)(media, PROMPTS)
        assert torch.equal(out, brightness(media, 0)) and server.service.scored - before == 2


def test_uncached_asks_again_for_what_the_journal_holds(media, tmp_path):
    with serving({"light": brightness}) as server:
        reward = remote(server, journal=str(tmp_path / "scores.jsonl"))
        first = reward(media, PROMPTS)
        with reward.uncached():
            assert torch.equal(reward(media, PROMPTS), first) and server.service.scored == 8
        assert torch.equal(reward(media, PROMPTS), first) and server.service.scored == 8


def test_failed_samples_are_not_journalled(media, tmp_path):
    path = tmp_path / "scores.jsonl"
    with serving(
        {"nan": lambda m, p, c: torch.where(torch.arange(len(p)) == 1, math.nan, 1.0)}
    ) as server:
        assert remote(server, journal=str(path))(media, PROMPTS).isnan().tolist() == [
            False,
            True,
            False,
            False,
        ]
    assert len(ScoreJournal(path).scores) == 3


# --- tokens and settings


def test_the_right_token_opens_and_a_wrong_one_is_a_sentence(media, monkeypatch):
    monkeypatch.setenv("SERVER_TOKEN", "a-secret-of-20-chars")
    monkeypatch.setenv("WRONG_TOKEN", "another-of-20-characters")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with serving({"light": brightness}, token_env="SERVER_TOKEN") as server:
        assert torch.equal(
            remote(server, token_env="SERVER_TOKEN")(media, PROMPTS), brightness(media, 0)
        )
        for variable, said in (
            ("WRONG_TOKEN", "it wants another token"),
            (None, "it wants a token; name the variable"),
        ):
            with pytest.raises(ValueError, match=said):
                remote(server, token_env=variable)
        with pytest.raises(
            ValueError, match="token_env=NO_TOKEN: this environment variable is empty or not set"
        ):
            remote(server, token_env="NO_TOKEN")


@pytest.mark.parametrize("url", ["127.0.0.1:8321", "ftp://host", "http://", "http://[::1", ""])
def test_an_address_that_is_none_is_a_sentence(url):
    with pytest.raises(ValueError, match='reward "remote": url=.*write http://HOST:PORT'):
        rewards.load("remote", url=url)


def test_settings_are_checked():
    with pytest.raises(
        ValueError,
        match=r'"url" is missing; give remote.url=VALUE .Address of the server, as http://127',
    ):
        rewards.load("remote")
    with pytest.raises(
        ValueError, match='batch=0.*unknown setting "time_out"; did you mean "timeout"'
    ):
        rewards.load("remote", url="http://127.0.0.1:1", batch=0, time_out=1)
    assert all(field.description for field in Remote.Settings.model_fields.values())


def test_a_proxy_of_the_environment_does_not_stand_before_this_machine(media, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving({"light": brightness}) as server:
        assert torch.equal(remote(server)(media, PROMPTS), brightness(media, 0))
