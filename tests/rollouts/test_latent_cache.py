"""Latents on disk: the bits that the VAE gives, encoded once for all runs, never those of another
file."""

import pytest
import small
import torch
from torchvision.io import write_png

from flowrl import load_policy
from flowrl.data.stored import PictureCell
from flowrl.policy.module import ModulePolicy
from flowrl.rollouts import from_files
from flowrl.rollouts.latent_cache import LatentCache
from flowrl.runtime.store import files as disk


@pytest.fixture(scope="module")
def policy():
    return load_policy("shapes-sd3")


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    for i in range(4):
        pixels = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(i))
        write_png(pixels.to(torch.uint8), str(folder / f"{i}.png"))
    return [folder / f"{i}.png" for i in range(4)]


@pytest.fixture
def asked(policy, monkeypatch):
    """How many media the VAE has encoded."""
    seen, real = [], type(policy).encode_media
    monkeypatch.setattr(
        type(policy), "encode_media", lambda self, m: seen.append(len(m)) or real(self, m)
    )
    return seen


def stored(folder):
    return sorted(folder.glob("*/*.safetensors"))


def test_later_processes_get_the_same_bits_and_encode_nothing(policy, pictures, asked, tmp_path):
    plain = from_files.latents(policy, [*pictures, pictures[0]])
    assert asked == [1] * 4  # a file that comes twice is encoded once
    first = from_files.latents(policy, pictures, cache=LatentCache(tmp_path / "kept", policy))
    assert asked == [1] * 8 and len(stored(tmp_path / "kept")) == 4
    again = LatentCache(tmp_path / "kept", load_policy("shapes-sd3"))
    order = [3, 0, 0]
    found = from_files.latents(policy, [pictures[i] for i in order], cache=again)
    assert asked == [1] * 8
    assert torch.equal(plain[:4], first) and torch.equal(plain[order], found)
    assert first.dtype == torch.float32 and first.shape == (4, *policy.latent_shape)


def test_a_latent_does_not_depend_on_the_files_beside_it(policy, pictures):
    whole = from_files.latents(policy, pictures)
    for i, path in enumerate(pictures):
        assert torch.equal(whole[i], from_files.latents(policy, [path])[0])


def test_other_bytes_crops_tiles_and_weights_are_other_latents(pictures, tmp_path):
    policy = load_policy("shapes-sd3")
    path, seen = pictures[0], set()

    def name(crop="none"):
        seen.add(LatentCache(tmp_path / "kept", policy, crop).name(path))
        return len(seen)

    assert name() == name() == 1
    assert name("center") == 2
    path.write_bytes(pictures[1].read_bytes())  # the file's path is the same
    assert name() == 3
    policy.pipe.vae.use_tiling = not policy.pipe.vae.use_tiling
    assert name() == 4
    with torch.no_grad():
        next(policy.pipe.vae.parameters()).flatten()[-1] += 1e-3  # one number of one weight
    assert name() == 5
    policy.pipe.vae.bfloat16()
    assert name() == 6


def test_a_picture_in_a_table_is_its_bytes(policy, pictures, tmp_path):
    def cell(bytes_=None, path=None):
        made = {"bytes": bytes_, "path": path}
        how = {"column": "image", "version": "1", "folder": tmp_path / "media"}
        return PictureCell(where="a.parquet, row 1", cell=lambda: made, **how)

    cache = LatentCache(tmp_path / "kept", policy)
    names = [cache.name(cell(path.read_bytes())) for path in pictures[:2]]
    assert names == [cache.name(path) for path in pictures[:2]] and names[0] != names[1]
    assert cache.name(cell(path="0.png")) == names[0]


@pytest.mark.parametrize("how", ["torn", "flipped", "another"])
def test_a_damaged_file_is_said_and_encoded_again(how, policy, pictures, asked, tmp_path, caplog):
    plain = from_files.latents(policy, pictures[:2], cache=LatentCache(tmp_path, policy))
    path, other = stored(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "torn": whole[: len(whole) // 2],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "another": other.read_bytes(),
        }[how]
    )
    again = from_files.latents(policy, pictures[:2], cache=LatentCache(tmp_path, policy))
    assert torch.equal(plain, again) and asked == [1] * 3
    assert caplog.text.count("its medium is encoded again") == 1 and path.read_bytes() == whole


def test_a_full_disk_is_one_sentence_and_stops_nothing(
    policy, pictures, tmp_path, monkeypatch, caplog
):
    def full(path, content):
        raise disk.WriteError(f"{path} could not be written")

    plain = from_files.latents(policy, pictures)
    monkeypatch.setattr(disk, "write", full)
    cache = LatentCache(tmp_path / "kept", policy)
    assert torch.equal(plain, from_files.latents(policy, pictures, cache=cache))
    assert caplog.text.count("data.latent_cache: ") == caplog.text.count("stores no more") == 1


def test_a_folder_that_cannot_be_and_a_model_without_a_vae_are_refused(policy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="data.latent_cache=.* cannot be made a folder"):
        LatentCache(tmp_path / "file" / "kept", policy)
    plain = ModulePolicy(torch.nn.Linear(1, 1), (3, 8, 8))
    with pytest.raises(ValueError, match="keeps what a VAE encodes, and this model has none"):
        LatentCache(tmp_path / "kept", plain)


def listed(pictures):
    rows = [f'{{"file": "{path.name}", "prompt": "a square"}}\n' for path in pictures]
    disk.write(pictures[0].with_name("metadata.jsonl"), "".join(rows))
    return str(pictures[0].parent)


def test_a_run_with_a_cache_is_the_run_without(pictures, asked, tmp_path, monkeypatch):
    """An epoch and a half; and a run goes on with or without it."""
    monkeypatch.setitem(small.ALGORITHMS, "sft", {})
    usual = {"data__offline": listed(pictures), "reward__jpeg__weight": "0", "iterations": "3"}
    usual |= {"data__eval": "null", "batch__group": "1", "sampler__steps": "2"}
    kept = usual | {"data__latent_cache": str(tmp_path / "kept")}
    encoded = []
    for name, words in (("plain", usual), ("kept", kept)):
        asked.clear()
        made = small.trainer(tmp_path / name, "sft", **words)
        list(made)
        made.save()
        encoded.append(len(asked) - 1)  # one at the start tries the way back
    assert encoded == [6, 4]
    assert small.same(tmp_path / "plain", tmp_path / "kept")
    changed = small.config(tmp_path / "plain", "sft", **kept)
    assert small.Trainer(changed, resume=tmp_path / "plain").iteration == 3


def test_media_beside_rollouts_are_kept_too(pictures, asked, tmp_path):
    words = {"anchor__data__source": listed(pictures), "anchor__data__weight": "0.1"}
    words |= {"data__eval": "null", "data__latent_cache": str(tmp_path / "kept")}
    made = small.trainer(tmp_path / "run", "nft", **words)
    asked.clear()
    for iteration in range(2):
        made.source.draw_media(made.source, iteration, 2, made.setup.plan)
    assert asked == [1] * 4
