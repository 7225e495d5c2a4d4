"""Answers of text encoders on disk: the same bits, asked once for all runs, never a wrong one."""

import os
from collections import defaultdict

import pytest
import tiny
import tiny_parts
import torch
from transformers.modeling_outputs import BaseModelOutput

from flowrl.policy.replay import prompt_cache
from flowrl.policy.replay.encoders import Answers
from flowrl.policy.replay.prompt_cache import PromptCache
from flowrl.policy.replay.record import Encoding
from flowrl.policy.replay.unread import mapped, plain
from flowrl.runtime.store import files


@pytest.fixture(scope="module")
def net():
    return tiny_parts.clip_text(tiny_parts.tokenizer()).requires_grad_(False)


@pytest.fixture
def rows(net):
    """How many rows passed the encoder, call by call."""
    seen = []
    part = next(m for m in net.modules() if type(m).__name__ == "CLIPTextEmbeddings")
    hook = part.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    yield seen
    hook.remove()


TOKENS = torch.randint(3, 10, (3, 12), generator=torch.Generator().manual_seed(0))


def asked(net, cache, tokens=TOKENS, **how):
    """What a new process would be answered, read as a whole."""
    with Answers(cache).of({"text_encoder": net}), torch.no_grad():
        return mapped(lambda path, t: plain(t), net(tokens, output_hidden_states=True, **how))


def stored(folder):
    return sorted(folder.glob("*/*.safetensors"))


def test_another_process_gets_the_same_bits_and_asks_nothing(net, rows, tmp_path):
    plain = asked(net, None)
    first = asked(net, PromptCache(tmp_path))
    assert rows == [1] * 6 and len(stored(tmp_path)) == 3
    again = asked(net, PromptCache(tmp_path), TOKENS[[2, 0]])
    assert rows == [1] * 6
    for made, at in ((first, [0, 1, 2]), (again, [2, 0])):
        assert type(made) is type(plain) and made.keys() == plain.keys()
        assert torch.equal(made.pooler_output, plain.pooler_output[at])
        for ours, theirs in zip(made.hidden_states, plain.hidden_states, strict=True):
            assert torch.equal(ours, theirs[at])


def test_other_tokens_masks_weights_types_or_autocast_are_other_questions(net, rows, tmp_path):
    cache, one = PromptCache(tmp_path), TOKENS[:1]
    asked(net, cache, one)
    asked(net, cache, one + 1)
    asked(net, cache, one, attention_mask=torch.ones(1, 12, dtype=torch.long))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        asked(net, cache, one)
    assert len(rows) == len(stored(tmp_path)) == 4
    other = tiny_parts.clip_text(tiny_parts.tokenizer()).requires_grad_(False)
    assert prompt_cache.fingerprint(other) == prompt_cache.fingerprint(net)
    asked(other, cache, one)
    assert len(stored(tmp_path)) == 4
    with torch.no_grad():
        next(other.parameters()).flatten()[-1] += 1e-3  # one number of one weight
    assert prompt_cache.fingerprint(other) != prompt_cache.fingerprint(net)
    asked(other, PromptCache(tmp_path), one)
    asked(other.bfloat16(), PromptCache(tmp_path), one)
    assert len(stored(tmp_path)) == 6


@pytest.mark.parametrize("how", ["torn", "empty", "flipped", "another", "not a record"])
def test_a_damaged_file_is_noticed_and_its_prompt_encoded_again(how, net, rows, tmp_path, caplog):
    cache = PromptCache(tmp_path)
    plain = asked(net, cache, TOKENS[:2]).pooler_output
    path, other = stored(tmp_path)
    whole = path.read_bytes()
    damaged = {
        "torn": whole[: len(whole) // 2],
        "empty": b"",
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "another": other.read_bytes(),
        "not a record": whole.replace(b"transformers.", b"flowrl.xxxxxx"),
    }[how]
    assert damaged != whole
    path.write_bytes(damaged)
    assert torch.equal(asked(net, PromptCache(tmp_path), TOKENS[:2]).pooler_output, plain)
    assert rows == [1] * 3 and "is damaged" in caplog.text
    assert path.read_bytes() == whole


def test_a_file_that_would_import_a_module_is_no_answer(tmp_path):
    """torch keeps the factory of a defaultdict by its name, and imports its module."""
    path = tmp_path / "k.safetensors"
    path.write_bytes(prompt_cache.packed("k", defaultdict(list, {"a": torch.zeros(1)})))
    with pytest.raises(prompt_cache.Damaged, match="names a module"):
        prompt_cache.read(path, "k")


def test_what_was_used_longest_ago_goes_first(tmp_path):
    """Each answer holds 4096 bytes and a header; 14000 hold three."""
    cache = PromptCache(tmp_path, 14000 / 2**30)
    for k in range(5):
        cache.put(f"{k:064d}", [torch.full((1, 1024), float(k))])
        os.utime(cache._path(f"{k:064d}"), (k, k))
        if k == 1:
            assert cache.get(f"{0:064d}")[0][0, 0] == 0  # used again: now the newest
        cache.tidy()
    left = [k for k in range(5) if cache.get(f"{k:064d}") is not None]
    assert 0 in left and 4 in left and 1 not in left and len(left) < 4
    cache.put("f" * 64, [torch.zeros(1, 4096)])  # larger than all that may be kept
    assert cache.get("f" * 64) is None


def test_equal_tensors_are_stored_once(tmp_path):
    cache, t = PromptCache(tmp_path), torch.randn(1, 4096)
    cache.put("a" * 64, BaseModelOutput(last_hidden_state=t, hidden_states=(t - 1, t.clone())))
    answer = cache.get("a" * 64)
    assert torch.equal(answer.hidden_states[1], t) and torch.equal(answer[0], t)
    (path,) = stored(tmp_path)
    assert path.stat().st_size < 2.2 * t.numel() * 4


def test_a_disk_that_is_full_stops_no_run(net, rows, tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise files.WriteError(f"{path} could not be written")

    monkeypatch.setattr(files, "write", full)
    made = asked(net, PromptCache(tmp_path)).pooler_output
    assert torch.equal(made, asked(net, None).pooler_output)
    assert caplog.text.count("the run goes on and stores no more") == 1


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="model.prompt_cache=.* cannot be made a folder"):
        PromptCache(tmp_path / "file" / "cache")


def test_a_policy_of_a_known_model_asks_no_encoder_for_known_prompts(tmp_path):
    """Its prompts, negative ones, and those by which the pipeline is probed."""
    how = {
        "negative_prompt": "blurred",
        "encoding": Encoding(leave=True, cache=PromptCache(tmp_path)),
    }
    first = tiny.policy("sd3", **how)
    cond = first.encode(tiny.PROMPTS)
    assert first.turns.encoders.visits
    second = tiny.policy("sd3", **how)
    again = second.encode(tiny.PROMPTS)
    assert second.turns.encoders.visits == 0
    x = torch.randn((2, *first.latent_shape), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(2)
    assert torch.equal(first.velocity(x, 0.7, cond, rows), second.velocity(x, 0.7, again, rows))
    second.encode(["a green circle"])
    assert second.turns.encoders.visits == 1
