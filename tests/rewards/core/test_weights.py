"""Weights and prompt texts: only tensors, every key, and a sentence for whatever is missing."""

import hashlib
import logging
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowrl.rewards.core import tokens, weights

STATE = {"weight": torch.ones(2, 3), "bias": torch.arange(2.0)}


class Bomb:
    """A pickle that runs code when opened."""

    def __reduce__(self):
        return (print, ("ran",))


# --- where things lie


def test_a_file_a_folder_and_a_file_in_a_folder_are_found(tmp_path):
    (tmp_path / "head.pt").write_bytes(b"x")
    assert weights.path_of(str(tmp_path / "head.pt"), reward="r") == tmp_path / "head.pt"
    assert weights.path_of(str(tmp_path), reward="r") == tmp_path
    assert weights.path_of(str(tmp_path), "head.pt", reward="r") == tmp_path / "head.pt"
    assert (
        weights.path_of(str(tmp_path / "head.pt"), "other.pt", reward="r") == tmp_path / "head.pt"
    )


@pytest.mark.parametrize(
    "source",
    ["/nowhere/x.pt", "./x", "x.safetensors", "folder/x.pth", "a/b/c", "one", "~/nowhere-at-all"],
)
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(source):
    with pytest.raises(
        ValueError, match=f"reward.mps.weights={source}: there is no such file or folder"
    ):
        weights.path_of(source, reward="mps")


def test_a_folder_without_the_file_says_which_file_it_lacks(tmp_path):
    with pytest.raises(ValueError, match=f"there is no such file or folder .{tmp_path}/head.pt"):
        weights.path_of(str(tmp_path), "head.pt", reward="r")


@pytest.mark.parametrize(
    ("file", "needs", "put"),
    [
        ("head.pt", "head.pt of owner/name", "head.pt"),
        (None, "needs owner/name, which", "the folder"),
    ],
)
def test_a_hub_out_of_reach_says_what_to_fetch_and_where_to_put_it(monkeypatch, file, needs, put):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = (
        f"{needs}.*could not be fetched .*download it from https://huggingface.co/owner/name and"
        f" set reward.r.place=/path/to/{put}"
    )
    with pytest.raises(ValueError, match=said):
        weights.path_of("owner/name", file, reward="r", setting="place")


def test_of_a_file_that_is_not_read_alone_the_other_one_is_named_too(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError,
        match=(
            "reward r needs a.pt and a.json of owner/name, .* set reward.r.weights=/path/to/the"
            " folder with both"
        ),
    ):
        weights.path_of("owner/name", "a.pt", reward="r", beside="a.json")


def test_a_file_of_the_hub_is_fetched_alone_and_a_repository_whole(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *a, **_: asked.append(a) or str(tmp_path / "x")
    )
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *a, **_: asked.append(a) or str(tmp_path)
    )
    assert weights.path_of("owner/name-v2.5", "x", reward="r") == tmp_path / "x"
    assert weights.path_of("owner/name-v2.5", reward="r") == tmp_path
    assert asked == [("owner/name-v2.5", "x"), ("owner/name-v2.5",)]


# --- networks and tokenizers of transformers


@pytest.fixture
def halved(tmp_path):
    """The folder of a tiny CLIP, in half precision."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision = sizes | {"num_attention_heads": 1, "image_size": 16, "patch_size": 8}
    text = sizes | {"num_attention_heads": 1, "vocab_size": 8, "bos_token_id": 1, "eos_token_id": 2}
    CLIPModel(CLIPConfig(vision_config=vision, text_config=text)).half().save_pretrained(tmp_path)
    return tmp_path


def test_a_network_is_frozen_fp32_whatever_its_file_holds(halved):
    from transformers import CLIPModel

    found = weights.network(CLIPModel, str(halved), reward="r")
    assert {p.dtype for p in found.parameters()} == {torch.float32} and not found.training
    assert not any(p.requires_grad for p in found.parameters())
    (halved / "model.safetensors").unlink()
    said = (
        f"reward.r.backbone={halved} cannot be loaded: OSError: .*no file named model.safetensors"
    )
    with pytest.raises(ValueError, match=said):
        weights.network(CLIPModel, str(halved), reward="r", setting="backbone")


def test_the_other_tower_may_be_surplus_in_a_network_where_it_is_named(halved):
    from transformers import CLIPVisionModelWithProjection as Tower

    with pytest.raises(
        ValueError, match="does not fit CLIPVision.*: .* unknown keys .logit_scale, text_model"
    ):
        weights.network(Tower, str(halved), reward="r")
    weights.network(Tower, str(halved), reward="r", ignore=("text_", "logit_scale"))


def test_a_tokenizer_without_its_files_is_refused_though_transformers_makes_one(tmp_path):
    from transformers import BertTokenizer, CLIPTokenizer

    for cls in (BertTokenizer, CLIPTokenizer):
        with pytest.raises(ValueError, match=f"r.*{tmp_path}"):
            weights.tokenizer(cls, str(tmp_path), reward="r")
        with pytest.raises(
            ValueError, match="reward r needs owner/name, .*set reward.r.words=/path/to/the folder"
        ):
            weights.tokenizer(cls, "owner/name", reward="r", setting="words")


# --- tensors


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.safetensors"])
def test_a_state_dict_comes_back_from_either_format(tmp_path, name):
    (save_file if name.endswith("safetensors") else torch.save)(STATE, tmp_path / name)
    found = weights.tensors(tmp_path / name)
    assert found.keys() == STATE.keys() and torch.equal(found["weight"], STATE["weight"])


def test_a_state_dict_under_a_key_is_taken_from_under_it(tmp_path):
    torch.save({"state_dict": STATE, "epoch": 3}, tmp_path / "x.pt")
    assert weights.tensors(tmp_path / "x.pt", under="state_dict").keys() == STATE.keys()
    with pytest.raises(
        ValueError, match="x.pt holds a dict, expected a state dict: names and tensors"
    ):
        weights.tensors(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "write",
    [lambda path: torch.save(Bomb(), path), lambda path: path.write_bytes(pickle.dumps(Bomb()))],
)
def test_a_pickle_that_could_run_code_is_refused_unopened(tmp_path, write, capsys):
    write(tmp_path / "x.pth")
    with pytest.raises(
        ValueError,
        match=("x.pth is not a file of tensors, or it could run code when opened; convert it once"),
    ):
        weights.tensors(tmp_path / "x.pth")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"<html>404</html>" * 100])
def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path, content):
    for name in ("x.pt", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a .*file"):
            weights.tensors(tmp_path / name)
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder; name the file in it"):
        weights.tensors(tmp_path)


def test_a_checkpoint_that_is_no_state_dict_is_named(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "x.pt")
    with pytest.raises(ValueError, match="x.pt holds a list, expected a state dict"):
        weights.tensors(tmp_path / "x.pt")


# --- filling a module


def test_a_filled_module_is_frozen_and_in_eval_mode():
    module = weights.fill(nn.Linear(3, 2), STATE, path="x.pt")
    assert torch.equal(module.bias, STATE["bias"]) and not module.training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"weight": STATE["weight"]}, r"x.pt does not fit Linear: 1 keys missing \(bias\)$"),
        (STATE | {"c": torch.ones(1)}, r"1 unknown keys \(c\)$"),
        (STATE | {k: torch.ones(1) for k in "cdefg"}, r"5 unknown keys \(c, d, e, ...\)$"),
        (
            STATE | {"bias": torch.ones(4)},
            r"1 tensors of another shape \(bias \(4,\) instead of \(2,\)\)$",
        ),
        ({"c": torch.ones(1)}, r"2 keys missing \(bias, weight\); 1 unknown keys \(c\)$"),
    ],
)
def test_missing_unknown_and_misshapen_keys_are_named(state, said):
    with pytest.raises(ValueError, match=said):
        weights.fill(nn.Linear(3, 2), state, path="x.pt")


def test_buffers_that_a_library_computes_may_be_missing_or_surplus():
    module = nn.BatchNorm1d(2)
    state = {
        "weight": torch.ones(2),
        "bias": torch.ones(2),
        "running_mean": torch.ones(2),
        "extra.ids": torch.ones(1),
    }
    filled = weights.fill(module, state, path="x.pt", ignore=("running_", "num_batches", "extra"))
    assert filled.bias.tolist() == [1, 1]
    with pytest.raises(ValueError, match="keys missing .num_batches_tracked, running_var"):
        weights.fill(module, state, path="x.pt", ignore=("extra",))


# --- prompt texts


def test_a_template_is_the_text_with_the_right_digest_with_or_without_a_last_newline(tmp_path):
    digest = hashlib.sha256(b"rate {} now").hexdigest()
    for content in (b"rate {} now", b"rate {} now\n"):
        (tmp_path / "t.txt").write_bytes(content)
        assert (
            weights.template(
                tmp_path / "t.txt", sha256=digest[:16], reward="r", origin="line 3 of file x"
            )
            == "rate {} now"
        )
    (tmp_path / "t.txt").write_text("rate {} later")
    with pytest.raises(
        ValueError,
        match=(
            f"not the text that the model was trained with: sha256 .*expected {digest[:16]}.*line 3"
            " of file x"
        ),
    ):
        weights.template(
            tmp_path / "t.txt", sha256=digest[:16], reward="r", origin="line 3 of file x"
        )


def test_a_template_that_is_not_there_says_where_to_find_it(tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            "reward r needs its model's own prompt text: save line 3 as a text file and set"
            " reward.r.rubric="
        ),
    ):
        weights.template(None, sha256="00", reward="r", setting="rubric", origin="line 3")
    with pytest.raises(
        ValueError, match="reward.r.template=/nowhere.txt: there is no such file; save line 3 there"
    ):
        weights.template("/nowhere.txt", sha256="00", reward="r", origin="line 3")


# --- prompts that are cut


def test_prompts_that_are_cut_are_told_about_once_for_each_reward(caplog, monkeypatch):
    monkeypatch.setattr(tokens, "_told", set())
    with caplog.at_level(logging.WARNING, "flowrl"):
        assert tokens.warn_cut("a", [5, 77], 77) == 0
        assert tokens.warn_cut("a", [78, 5, 90], 77) == 2
        assert tokens.warn_cut("a", [100], 77) == 1
        assert tokens.warn_cut("b", [36], 35) == 1
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and said[1].startswith("b reads 35 tokens")
    assert (
        said[0]
        == "a reads 77 tokens of a prompt: 2 of the first 3 are longer (up to 90); the rest does"
        " not count (said once)"
    )


def test_prompts_that_are_all_known_are_counted_as_all(caplog, monkeypatch):
    monkeypatch.setattr(tokens, "_told", set())
    with caplog.at_level(logging.WARNING, "flowrl"):
        assert tokens.warn_cut("a", [78, 5, 90], 77, known=True) == 2
    assert caplog.messages == [
        "a reads 77 tokens of a prompt: 2 of 3 are longer (up to 90); the rest does not count (said"
        " once)"
    ]


# --- tests that need a hub


def conftest_of(pytestconfig):
    """The module of tests/conftest.py: other folders have files of that name."""
    path = Path(__file__).resolve().parents[2] / "conftest.py"
    return pytestconfig.pluginmanager.get_plugin(str(path))


@pytest.mark.parametrize(
    ("chosen", "offline"),
    [
        ("hub", "0"),
        ("not gpu and (hub)", "0"),
        ("", "1"),
        ("not hub", "1"),
        ("gpu and not hub", "1"),
        ("not (hub or gpu)", "1"),
    ],
)
def test_only_pytest_m_hub_goes_online(pytestconfig, chosen, offline):
    assert conftest_of(pytestconfig).offline(chosen) == offline


def test_tests_of_published_weights_are_skipped_offline_and_where_no_hub_answers(
    pytestconfig, monkeypatch
):
    conftest = conftest_of(pytestconfig)
    assert conftest.why_no_hub.__wrapped__() == "HF_HUB_OFFLINE is set"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert conftest.why_no_hub.__wrapped__("http://127.0.0.1:9").startswith(
        "no model hub answers: ConnectError"
    )
