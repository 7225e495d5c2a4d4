"""Encoders asked once: equal content is answered from memory, anything else by the network."""

import importlib.util
import sys
from pathlib import Path

import pytest
import tiny
import tiny_parts
import torch
from long import but
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from zoo import cases

from flowrl.policy.replay import encoders
from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.errors import Unknown
from flowrl.policy.replay.items import items_of
from flowrl.policy.replay.record import Runner
from flowrl.policy.replay.unread import leaves, plain

TOKENS = torch.randint(3, 10, (3, 12), generator=torch.Generator().manual_seed(0))


class Doubler(nn.Module):
    """Twice what it is given; counts how often it is asked."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.asked = 0

    def encode(self, x, scale=1.0, how=None):
        self.asked += 1
        return {"latents": (self.weight * scale * x, [x + 1])}


@pytest.fixture
def vae():
    return Doubler()


@pytest.mark.parametrize(
    ("first", "again", "asked"),
    [
        ((torch.ones(2, 3),), (torch.ones(2, 3),), 1),
        ((torch.ones(2, 3),), (torch.ones(2, 3, dtype=torch.float64),), 2),
        ((torch.ones(2, 3),), (torch.ones(3, 2),), 2),
        ((torch.ones(2, 3),), (torch.zeros(2, 3),), 2),
        ((torch.ones(2), 1.0), (torch.ones(2), 3.0), 2),
        ((torch.ones(2), 1.0, ["a", None]), (torch.ones(2), 1.0, ["a", None]), 1),
        ((torch.ones(2), 1.0, {"a": 1}), (torch.ones(2), 1.0, {"a": 2}), 2),
        ((torch.ones(2), 1.0, object()), (torch.ones(2), 1.0, object()), 2),  # no content to see
    ],
)
def test_a_network_is_asked_again_only_for_other_content(vae, first, again, asked):
    with Answers().of({"vae": vae}):
        one = vae.encode(*first)
        two = vae.encode(*again)
    assert vae.asked == asked
    assert torch.equal(one["latents"][0], 2 * first[0] * (first[1] if len(first) > 1 else 1))
    assert torch.equal(two["latents"][0], 2 * again[0] * (again[1] if len(again) > 1 else 1))


def test_edits_of_an_answer_or_of_an_argument_do_not_reach_later_answers(vae):
    x = torch.ones(2)
    with Answers().of({"vae": vae}):
        for _ in range(3):
            answer = vae.encode(x)
            assert answer["latents"][0].tolist() == [2, 2] and answer["latents"][1][0][0] == 2
            answer["latents"][0].mul_(5)
            answer["latents"][1].clear()
        assert vae.asked == 1
        x.add_(1)
        assert vae.encode(x)["latents"][0].tolist() == [4, 4] and vae.asked == 2


def test_two_networks_do_not_answer_for_each_other():
    one, two = Doubler(), Doubler()
    two.weight.fill_(3.0)
    with Answers().of({"one": one, "two": two}):
        assert one.encode(torch.ones(1))["latents"][0] == 2
        assert two.encode(torch.ones(1))["latents"][0] == 3


def test_a_trained_network_and_one_beside_the_denoiser_are_asked_each_time(vae):
    answers = Answers()
    vae.weight.requires_grad_()
    with answers.of({"vae": vae}):
        vae.encode(torch.ones(1)), vae.encode(torch.ones(1))
    vae.weight.requires_grad_(False)
    with answers.of({"vae": vae}):
        answers.paused = True
        vae.encode(torch.ones(1)), vae.encode(torch.ones(1))
    assert vae.asked == 4 and not answers.kept


def test_an_answer_with_a_gradient_is_not_kept(vae):
    answers, x = Answers(), torch.ones(2, requires_grad=True)
    with answers.of({"vae": vae}):
        for k in (1, 2):
            vae.encode(x)["latents"][0].sum().backward()
            assert x.grad.tolist() == [2 * k, 2 * k] and vae.asked == k
    assert not answers.kept


def test_methods_are_the_networks_own_again_afterwards_also_after_an_error(vae):
    with pytest.raises(RuntimeError), Answers().of({"vae": vae}):
        assert "encode" in vae.__dict__
        raise RuntimeError
    assert "encode" not in vae.__dict__ and "forward" not in vae.__dict__
    vae.encode = own = lambda x: x  # one that stood on the instance stays there
    with Answers().of({"vae": vae}):
        assert vae.encode is not own
    assert vae.encode is own


def test_the_oldest_answers_are_forgotten_and_one_too_large_is_never_kept(vae, monkeypatch):
    """What is read of an answer to x (n,) is n numbers of 4 bytes; 50 bytes hold three of n = 4."""
    monkeypatch.setattr(encoders, "LARGEST", 50)
    answers = Answers()

    def read(value):
        with answers.of({"vae": vae}):
            return vae.encode(torch.as_tensor(value))["latents"][0].tolist()

    for value in (0, 1, 2, 0, 3):  # 0 is used again, so 1 is the oldest when 3 comes
        read([float(value)] * 4)
    assert vae.asked == 4 and answers.size == 48
    assert read([0.0] * 4) == [0] * 4 and vae.asked == 4
    assert read([1.0] * 4) == [2] * 4 and vae.asked == 5
    for _ in range(2):
        read([0.0] * 50)
    assert vae.asked == 7 and answers.size == 48


def embeddings(net):
    """The module of a CLIP text encoder that every prompt passes."""
    return next(m for m in net.modules() if type(m).__name__ == "CLIPTextEmbeddings")


def test_each_row_of_a_text_encoder_is_asked_once_whichever_rows_are_beside_it():
    net = tiny_parts.clip_text(tiny_parts.tokenizer())
    net.requires_grad_(False)
    tokens = torch.randint(3, 10, (3, 12), generator=torch.Generator().manual_seed(0))
    mask, rows = torch.ones(3, 12, dtype=torch.long), []
    embeddings(net).register_forward_hook(lambda module, args, out: rows.append(len(out)))
    asked = [[0, 1], [1, 2], [2, 2, 0, 1], [1]]
    alone = [net(tokens[k], attention_mask=mask[k], output_hidden_states=True) for k in asked]
    rows.clear()
    with Answers().of({"text": net}), torch.no_grad():
        for which, expected in zip(asked, alone, strict=True):
            made = net(tokens[which], attention_mask=mask[which], output_hidden_states=True)
            assert type(made) is type(expected) and made.keys() == expected.keys()
            assert torch.allclose(made.pooler_output, expected.pooler_output, atol=1e-6)
            for ours, theirs in zip(made.hidden_states, expected.hidden_states, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-6)
            made.last_hidden_state.zero_()
        assert rows == [1, 1, 1]
        net(tokens[:1], attention_mask=mask[:1] * torch.tensor([1] * 11 + [0]))
        assert rows == [1, 1, 1, 1], "another mask is another question"


def test_a_prompt_is_encoded_to_the_last_bit_alike_whatever_was_encoded_before_and_beside_it():
    """A resumed run, which knows no answers yet, asks for other rows at a time."""
    net = tiny_parts.clip_text(tiny_parts.tokenizer(), width=64)
    net.requires_grad_(False)
    tokens = torch.randint(3, 10, (24, 12), generator=torch.Generator().manual_seed(0))
    with Answers().of({"text": net}), torch.no_grad():
        expected = [net(tokens[k : k + 1]).pooler_output[0] for k in range(24)]
    for asked in ([[*range(24)]], [[5], [*range(24)]], [[*range(3, 9)], [*range(24)]]):
        with Answers().of({"text": net}), torch.no_grad():
            *_, made = (net(tokens[rows]).pooler_output for rows in asked)
        assert torch.equal(made, torch.stack(expected))


def test_runs_of_a_pipeline_encode_a_prompt_once_and_ask_the_denoiser_each_time():
    pipe, asked, steps = tiny.pipeline("sd3"), [], []
    pipe.text_encoder.requires_grad_(False)
    embeddings(pipe.text_encoder).register_forward_hook(lambda *a: asked.append(a))
    pipe.transformer.proj_out.register_forward_hook(lambda *a: steps.append(a))
    runner = Runner(pipe, dict(tiny.CALLS["sd3"], guidance_scale=1.0), {})
    results = [runner.run(items_of(tiny.PROMPTS), 4) for _ in range(2)]
    assert torch.equal(*results)
    assert (len(asked), len(steps)) == (len(tiny.PROMPTS), 8)
    runner.run(items_of(["a green circle", tiny.PROMPTS[0]]), 4)
    assert len(asked) == len(tiny.PROMPTS) + 1 and len(asked[-1][2]) == 1, "one row is new"


# ---------------------------------------------------------------------------
# what is kept of an answer


def text_encoder(**how):
    return tiny_parts.clip_text(tiny_parts.tokenizer(), **how).requires_grad_(False)


def asked(answers, net, read, tokens=TOKENS, **how):
    """What a run reads of the answer to some tokens."""
    with answers.of({"text": net}), torch.no_grad():
        return plain(read(net(tokens, output_hidden_states=True, **how)))


READ = {  # ways to reach a tensor -> where it is
    "an attribute": (lambda out: out.pooler_output + 0, {("pooler_output",)}),
    "a position": (lambda out: out[0] * 1, {("last_hidden_state",)}),
    "a key": (lambda out: out["pooler_output"].clone(), {("pooler_output",)}),
    "a layer": (lambda out: out.hidden_states[-2].float().mul(2), {("hidden_states", 2)}),
    "several layers": (
        lambda out: torch.stack(out.hidden_states[1:3]),
        {("hidden_states", 1), ("hidden_states", 2)},
    ),
    "a tuple": (lambda out: torch.cat(out.to_tuple()[2]), {("hidden_states", k) for k in range(4)}),
    "an edit": (lambda out: out[0].add_(1), {("last_hidden_state",)}),
    "a module": (lambda out: nn.Linear(16, 2)(out[1]), {("pooler_output",)}),
    "after a look at shapes": (
        lambda out: out[1] if out[0].ndim == 3 and out[0].shape[0] == len(out[1]) else None,
        {("pooler_output",)},
    ),
}


@pytest.mark.parametrize(("read", "places"), READ.values(), ids=READ)
def test_what_the_pipeline_reads_of_an_answer_is_kept_and_nothing_else(read, places):
    net, answers = text_encoder(), Answers()
    torch.manual_seed(0)
    whole = read(net(TOKENS[:1], output_hidden_states=True))
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(asked(answers, net, read, TOKENS[:1]), whole)
    (answer,) = answers.kept.values()
    held = {path: t for path, t in leaves(answer).items() if not t.is_meta}
    assert held.keys() == places
    assert answers.size == sum(t.numel() * 4 for t in held.values())


def test_what_is_read_later_is_asked_for_once_more_and_then_kept_too():
    net, answers, rows = text_encoder(), Answers(), []
    embeddings(net).register_forward_hook(lambda module, args, out: rows.append(len(out)))
    plain_answer = net(TOKENS[1:2], output_hidden_states=True)
    for places in (["pooler_output"], ["last_hidden_state", "pooler_output"]):
        for _ in range(2):
            made = asked(answers, net, lambda out, p=places: [out[key] * 1 for key in p])
            for key, value in zip(places, made, strict=True):
                assert torch.equal(value[1], plain_answer[key][0])
    assert rows == [1] + [1] * 6, "each of three rows twice"


def test_a_distribution_of_latents_keeps_what_is_drawn_from():
    """Of the tensors that diffusers puts there (parameters, mean, log of the variance, standard
    deviation and variance) a draw reads the mean and the deviation."""
    vae, answers, x = (
        tiny_parts.image_vae().requires_grad_(False),
        Answers(),
        torch.ones(1, 3, 8, 8),
    )

    def drawn(latents):
        return latents.latent_dist.sample(torch.Generator().manual_seed(0))

    expected = drawn(vae.encode(x))
    for _ in range(2):
        with answers.of({"vae": vae}):
            assert torch.equal(drawn(vae.encode(x)), expected)
    (answer,) = answers.kept.values()
    held = {path[-1] for path, t in leaves(answer).items() if not t.is_meta}
    assert held == {"mean", "std"}


def test_a_language_model_makes_the_logits_of_all_tokens_only_where_they_are_read():
    tok = tiny_parts.tokenizer("qwen", 64)
    net, made = tiny_parts.qwen_text(tok).requires_grad_(False), []
    net.lm_head.register_forward_hook(lambda module, args, out: made.append(out.shape[1]))
    whole = net(TOKENS[:1], output_hidden_states=True)
    answers = Answers()
    states = asked(answers, net, lambda out: out.hidden_states[-1] + 0, TOKENS[:1])
    assert made == [12, 1] and torch.equal(states, whole.hidden_states[-1])
    for _ in range(2):
        logits = asked(answers, net, lambda out: out.logits[:, : out.logits.shape[1]], TOKENS[:1])
        assert made == [12, 1, 12] and torch.equal(logits, whole.logits)


class TokensFirst(PreTrainedModel):
    """A text encoder whose states are (L, n, D), with a number of pictures for each prompt."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.asked = []
        self.table = nn.Embedding(64, 4)

    def forward(self, input_ids, pixels=None):
        self.asked.append(len(input_ids))
        out = self.table(input_ids).transpose(0, 1)
        if pixels is not None:
            out = out + pixels.reshape(len(input_ids), -1).mean(1)[:, None]
        return {"states": out, "patches": torch.zeros(5, 4) if pixels is None else pixels * 2}

    def generate(self, input_ids, length=3):
        self.asked.append(len(input_ids))
        return torch.cat([input_ids, torch.randint(0, 64, (len(input_ids), length))], 1)


def test_rows_are_found_where_tokens_come_first_and_where_pictures_are_the_same_for_each():
    net, answers = TokensFirst().requires_grad_(False), Answers()
    pixels, tokens = torch.rand(2, 3), TOKENS[[0, 1, 0]]
    with answers.of({"text": net}):
        assert torch.equal(net(tokens)["states"], net.table(tokens).transpose(0, 1))
        assert net.asked == [1, 1]
        made = net(tokens, pixels=pixels.repeat(3, 1))["states"]
        assert net.asked == [1, 1, 1, 1]
        net(tokens, pixels=torch.rand(6, 3))  # other pictures for each: one question
        assert net.asked == [1, 1, 1, 1, 3]
        both = net(tokens[:2], pixels=pixels[:1].repeat(2, 1))
        assert both["patches"].shape == (2, 3) and net.asked[5:] == [1, 1]
        net(tokens)["patches"].sum()  # it has no rows: the network is asked for all together
        assert net.asked[7:] == [3]
    assert torch.allclose(made, net.table(tokens).transpose(0, 1) + pixels.mean())


class Placed(PreTrainedModel):
    """A text encoder whose tokens have places on three axes, (3, n, L), as those of Qwen3-VL."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.asked = []

    def forward(self, input_ids, position_ids):
        self.asked.append(len(input_ids))
        return {"states": (input_ids + position_ids.sum(0))[..., None].float()}


def test_rows_of_places_on_several_axes_are_their_second_axis():
    net, answers = Placed(), Answers()
    places = torch.arange(3 * 3 * TOKENS.shape[1]).reshape(3, 3, -1)  # as many rows as axes
    tokens = TOKENS[[0, 1, 0]]
    whole = net(tokens, position_ids=places)["states"]
    net.asked.clear()
    with answers.of({"text": net}):
        assert torch.equal(net(tokens, position_ids=places)["states"], whole)
        assert torch.equal(net(tokens[:1], position_ids=places[:, :1])["states"], whole[:1])
    assert net.asked == [1, 1, 1]


def test_what_a_network_draws_for_a_prompt_is_drawn_once_whatever_is_beside_it():
    net, made = TokensFirst().requires_grad_(False), []
    for asked_of in ([[0], [1], [1, 2]], [[2, 1, 0]]):
        answers, rows = Answers(), {}
        for which in asked_of:
            torch.manual_seed(0)  # as a pipeline does that seeds a language model
            with answers.of({"text": net}):
                rows |= dict(zip(which, net.generate(TOKENS[which]).tolist(), strict=True))
        made.append(rows)
    assert made[0] == made[1] and net.asked == [1] * 6


def test_a_run_that_may_ask_nothing_new_ends_where_it_would():
    net, answers = text_encoder(), Answers()
    asked(answers, net, lambda out: out[0] + 0, TOKENS[:2])
    answers.closed = True
    asked(answers, net, lambda out: out[0] + 0, TOKENS[:2])
    with pytest.raises(Unknown):  # another prompt
        asked(answers, net, lambda out: out[0] + 0)
    with pytest.raises(Unknown):  # something else of a known one
        asked(answers, net, lambda out: out[1] + 0, TOKENS[:2])


# ---------------------------------------------------------------------------
# pipelines

SPEC = importlib.util.spec_from_file_location(
    "loading", Path(__file__).resolve().parents[2] / "scripts/bench/loading.py"
)
loading = importlib.util.module_from_spec(SPEC)
sys.modules["loading"] = loading
SPEC.loader.exec_module(loading)
QUICK = {"qwenimage", "sdxl", "kolors"}


@pytest.mark.parametrize("name", but(list(cases()), set(cases()) - QUICK))
def test_loading_asks_for_a_prompt_once_and_keeps_what_the_denoisers_are_given(name):
    try:
        _, found = loading.encoders(name)
    except ValueError:
        assert cases()[name].refused
        return
    for network, (calls, prompts, kept, given) in found.items():
        assert calls <= prompts + loading.AGAIN.get(name, 0), network
        assert kept <= 1.05 * given or name in loading.IN_VAIN, network


@pytest.mark.parametrize("name", ["flux", "modular_helios"])
def test_networks_compute_no_more_rows_at_the_start_than_is_allowed(name):
    """In a replayed call, and in the loop's own body, which costs more."""
    found = loading.costs(name)
    assert all(load + check <= most for load, check, most in found.values()), found
    assert found["transformer"][0] > 0 and found["transformer"][1] > 0
    assert found["transformer"][2] == (loading.MOST if name == "flux" else loading.BODY)
