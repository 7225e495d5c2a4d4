"""Revisions of hub repositories: asked for, pinned, and told in a run's environment.json."""

from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from flowrl.evaluation.suites import prompt_files
from flowrl.policy import load
from flowrl.rewards.core import weights
from flowrl.rewards.networks import vlm
from flowrl.runtime import hub
from flowrl.runtime.store import run_folder

ROOT = Path(__file__).resolve().parents[2]
PIN = "openai/clip-vit-large-patch14"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache that knows the commit of one repository's main."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_used", {})
    refs = tmp_path / "models--owner--repo" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    return tmp_path


def test_a_revision_follows_the_name_and_our_own_names_have_one():
    assert hub.split("owner/repo") == ("owner/repo", None)
    assert hub.split("owner/repo@v1.0") == ("owner/repo", "v1.0")
    assert hub.options("owner/repo@refs/pr/3") == {"revision": "refs/pr/3"}
    assert hub.options("owner/repo") == {}
    assert hub.split(PIN) == (PIN, hub.PINNED[PIN])
    assert hub.split(f"{PIN}@main") == (PIN, "main")
    with pytest.raises(ValueError, match='"owner/repo@" has nothing after the @'):
        hub.split("owner/repo@")


def test_pins_are_commits_of_repositories_that_configs_or_rewards_name():
    assert all(hub.COMMIT.fullmatch(commit) for commit in hub.PINNED.values())
    paths = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "rewards").rglob("*.py")]
    text = "".join(path.read_text() for path in paths)
    assert not [name for name in hub.PINNED if name not in text]


def test_what_was_used_is_told_by_its_commit(cache):
    hub.note("owner/repo")
    hub.note("owner/other@v2", dataset=True)
    hub.note(f"owner/third@{COMMIT}")
    told = {"owner/repo": COMMIT, "datasets/owner/other": "v2", "owner/third": COMMIT}
    assert hub.used() == told
    found = run_folder.environment()
    assert found["huggingface.co/owner/repo"] == COMMIT
    assert all(isinstance(value, str) for value in found.values())


class Loader:
    """What libraries are asked for; everything is there."""

    def __init__(self):
        self.asked, self.components, self.tokenizer = [], {}, Mock()

    def load_config(self, name, **options):
        return self.from_pretrained(name, **options) and {"_class_name": "FluxPipeline"}

    def from_pretrained(self, name, **options):
        self.asked.append((name, options.get("revision")))
        return self


def test_every_loader_is_asked_for_the_revision(cache, monkeypatch):
    asked = []

    def fetch(name, file=None, *, revision=None, **options):
        asked.append((name, revision))
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    loader = Loader()
    weights.path_of("owner/a@v1", "x.pt", reward="r")
    weights.path_of("owner/a@v2", reward="r")
    prompt_files._from_hub("hf:owner/a@v3/x.tsv", "suite", "")
    weights.from_folder_or_hub(loader.from_pretrained, "owner/a@v4", reward="r")
    monkeypatch.setattr("transformers.AutoProcessor", loader)
    vlm.processor_of("owner/a@v5", reward="r")
    monkeypatch.setattr("diffusers.DiffusionPipeline", loader)
    load._pretrained("owner/a@v6", None)
    load._pretrained("owner/a", None)
    assert asked == [("owner/a", "v1"), ("owner/a", "v2"), ("owner/a", "v3")]
    assert loader.asked == [("owner/a", v) for v in ("v4", "v5", "v6", "v6", None, None)]
    assert hub.used() == {"owner/a": "main", "datasets/owner/a": "v3"}


def test_what_cannot_be_fetched_is_named_with_its_revision_and_a_link_without(cache):
    said = "needs x.pt of owner/a@v1, .* https://huggingface.co/owner/a and set"
    with pytest.raises(ValueError, match=said):
        weights.path_of("owner/a@v1", "x.pt", reward="r")
