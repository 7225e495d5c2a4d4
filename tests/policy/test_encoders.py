"""Encoders asked once: equal content is answered from memory, anything else by the network."""

import pytest
import tiny
import tiny_parts
import torch
from torch import nn

from flowrl.policy.replay import encoders
from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.items import items_of
from flowrl.policy.replay.record import Runner


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
    """An answer to x (n,) holds 2 n numbers of 4 bytes; 100 bytes hold three of n = 4."""
    monkeypatch.setattr(encoders, "LARGEST", 100)
    answers = Answers()
    with answers.of({"vae": vae}):
        for value in (0, 1, 2, 0, 3):  # 0 is used again, so 1 is the oldest when 3 comes
            vae.encode(torch.full((4,), float(value)))
        assert vae.asked == 4 and answers.size == 96
        vae.encode(torch.zeros(4))
        assert vae.asked == 4
        vae.encode(torch.ones(4))
        assert vae.asked == 5
        for _ in range(2):
            vae.encode(torch.zeros(50))
        assert vae.asked == 7 and answers.size == 96
        answers.clear()
        vae.encode(torch.zeros(4))
        assert vae.asked == 8


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
