"""A decorated function in a user's own file is a reward: in Python, in a config, and in
training."""

from pathlib import Path

import pytest
import small
import torch

import flowrl
from flowrl.cli.common import parse_rewards
from flowrl.config.load import load_config
from flowrl.rewards import RewardBug, load, load_set, score

ROOT = Path(__file__).resolve().parents[2]
FILE = '''
import flowrl

@flowrl.reward(scale="mean of a colour channel, 0 to 1")
def red(media, prompts, context=None, *, channel: int = 0):
    """How red it is."""
    return media[..., channel, :, :].flatten(1).mean(1)

@flowrl.reward(needs=["meta"], reads=["wanted"], reads_prompt=True)
def wanted(media, prompts, context=None):
    return media.flatten(1).mean(1) - media.new_tensor([meta["wanted"] for meta in context.meta])

def plain(media, prompts, context=None):
    return media.flatten(1).mean(1)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_decorated_function_is_loaded_with_its_keyword_arguments_as_settings(file):
    media = torch.zeros(2, 3, 4, 4)
    media[:, 1] = torch.tensor([0.25, 0.75])[:, None, None]
    assert load(f"{file}:red")(media, ["", ""]).tolist() == [0.0, 0.0]
    green = load(f"{file}:red", channel=1)
    assert green(media, ["", ""]).tolist() == [0.25, 0.75]
    assert (green.name, green.scale, type(green).__doc__) == (
        "red",
        "mean of a colour channel, 0 to 1",
        "How red it is.",
    )


def test_what_a_function_declares_is_checked(file):
    reward = load(f"{file}:wanted")
    assert (reward.needs, reward.reads, reward.reads_prompt) == ({"meta"}, {"wanted"}, True)
    with pytest.raises(ValueError, match='"wanted" needs the context column "meta"'):
        score(torch.zeros(1, 3, 4, 4), ["a"], {"wanted": reward})


def test_a_decorated_function_is_still_a_function():
    @flowrl.reward
    def brightness(media, prompts, context=None):
        return media.flatten(1).mean(1)

    assert brightness(torch.ones(1, 3, 2, 2), [""]).tolist() == [1.0]
    assert score(torch.ones(1, 3, 2, 2), [""], {"brightness": brightness}).total.tolist() == [1.0]


def test_a_decorated_function_in_a_set_keeps_its_declarations():
    @flowrl.reward(needs=["group"], scale="ones")
    def grouped(media, prompts, context=None):
        return media.new_ones(len(media))

    assert load_set({"grouped": grouped}).needs == {"group"}
    assert load_set({"grouped": grouped}).rewards["grouped"].scale == "ones"


@pytest.mark.parametrize(
    "member, said",
    [
        ("rod", 'mine.py has no "rod"; did you mean "red"?'),
        ("plain", "plain is not a reward; put @flowrl.reward above it"),
        ("flowrl", "flowrl is not a reward"),
    ],
)
def test_what_is_no_reward_in_a_file_is_refused(file, member, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        load(f"{file}:{member}")


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file .*none.py"):
        load(f"{tmp_path}/none.py:red")
    (tmp_path / "broken.py").write_text("import flowrl\nraise KeyError('x')")
    with pytest.raises(ValueError, match="broken.py cannot be imported: KeyError: 'x'"):
        load(f"{tmp_path}/broken.py:red")


def test_an_unknown_setting_of_a_function_is_answered_with_the_nearest(file):
    with pytest.raises(ValueError, match='unknown setting "chanel"; did you mean "channel"'):
        load(f"{file}:red", chanel=1)


def test_a_function_that_takes_other_arguments_is_refused_when_it_is_asked_for(tmp_path):
    """Other rewards of its file are sound."""
    file = tmp_path / "some.py"
    file.write_text(
        "import flowrl\n"
        "@flowrl.reward\ndef short(media, prompts):\n    return media\n"
        "@flowrl.reward(verifies=['colr'])\ndef odd(media, prompts, context=None):\n    return 0\n"
        "@flowrl.reward\ndef good(media, prompts, context=None):\n    return media[:, 0, 0, 0]\n"
    )
    assert load(f"{file}:good").name == "good"
    said = r"takes 2 positional arguments; a reward takes \(media, prompts, context=None\)"
    with pytest.raises(ValueError, match=rf'some.py:short": short.* {said}'):
        load(f"{file}:short")
    with pytest.raises(ValueError, match='"colr" is not known to the checks; did you mean'):
        parse_rewards([f"{file}:odd"])

    @flowrl.reward
    def live(media, prompts):
        return media

    with pytest.raises(ValueError, match=said):
        load_set(live)


def test_a_config_names_a_file_by_its_absolute_path(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    cfg = load_config(None, ["reward=mine.py:red", "reward.red.channel=2", "reward.jpeg=0.5"])
    assert cfg.reward == {
        "red": {"weight": 1.0, "name": f"{file}:red", "channel": 2},
        "jpeg": {"weight": 0.5},
    }


def test_a_reward_needs_no_file_in_configs():
    assert load_config(None, ["reward=jpeg"]).reward == {"jpeg": {"weight": 1.0}}
    assert load_config("quickstart", ["reward=jpeg"]).reward == {"jpeg": {"weight": 1.0}}
    assert load_config(None, ["reward=jpeg", "reward=shapes"]).reward == {"shapes": {"weight": 1.0}}
    assert load_config(None, ["reward=shapes", "reward=jpeg"]).reward == {"jpeg": {"weight": 1.0}}


def test_a_reward_for_videos_refuses_images_and_the_other_way_round():
    class Clips(flowrl.rewards.Reward):
        name, video = "clips", "only"

        def __call__(self, media, prompts, context=None):
            return media.flatten(1).mean(1)

    class Stills(Clips):
        name, video = "stills", "no"

    with pytest.raises(ValueError, match='"clips" takes videos, and the media are images'):
        score(torch.zeros(1, 3, 4, 4), ["a"], {"clips": Clips()})
    with pytest.raises(ValueError, match='"stills" takes images, and the media are videos'):
        score(torch.zeros(1, 2, 3, 4, 4), ["a"], {"stills": Stills()})


def test_an_empty_prompt_is_refused_by_a_reward_that_reads_it(file):
    with pytest.raises(ValueError, match="reads the prompt, and that of sample 1 is empty"):
        score(
            torch.zeros(2, 3, 4, 4),
            ["a", " "],
            {"wanted": load(f"{file}:wanted")},
            flowrl.types.MediaContext(meta=[{"wanted": 0}] * 2),
        )


def test_a_reward_that_is_unavailable_stops_the_scoring():
    def gone(media, prompts, context=None):
        raise flowrl.rewards.RewardUnavailable("the server is gone")

    with pytest.raises(flowrl.rewards.RewardUnavailable, match="the server is gone"):
        score(torch.zeros(2, 3, 4, 4), ["a", "b"], {"gone": gone})
    assert not issubclass(flowrl.rewards.RewardUnavailable, RewardBug)


def test_the_example_of_the_docs_trains(tmp_path):
    example = ROOT / "docs" / "examples" / "red.py"
    assert example.read_text().rstrip() in (ROOT / "docs" / "rewards/write.md").read_text()
    assert sum(bool(line.strip()) for line in example.read_text().splitlines()) <= 5
    words = small.words(
        tmp_path / "run", reward=f"{example}:red", reward__red__floor="0.5", iterations="1"
    )
    result = small.invoke("train", *words)
    assert result.exit_code == 0, result.output
    line = small.lines(tmp_path / "run")[0]
    assert 0.3 < line["reward/red/mean"] < 0.5 and line["reward/total"] == pytest.approx(
        line["reward/red/mean"]
    )
