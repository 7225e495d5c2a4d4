"""Repositories of the model hub: which revision is asked for, and which commits were used.

A source is "owner/repo", or "owner/repo@revision" with a branch, a tag or a commit.
"""

from __future__ import annotations

import re
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
# commits of the repositories that our configs and rewards name; owner/repo@main asks for the newest
PINNED = {
    "Qwen/Qwen-Image": "75e0b4be04f60ec59a75f475837eced720f823b6",
    "Qwen/Qwen2-VL-2B-Instruct": "895c3a49bc3fa70a340399125c650a463535e71c",
    "Qwen/Qwen2-VL-7B-Instruct": "eed13092ef92e448dd6875b2a00151bd3f7db0ac",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "0fad780a534b6463e45facd96134c9f345acfa5b",
    "black-forest-labs/FLUX.1-dev": "3de623fc3c33e44ffbe2bad470d0f45bccf2eb21",
    "facebook/vjepa2-vitl-fpc64-256": "b3c1679b7c34d3255ef3547f27c7b226aefab26f",
    "google-bert/bert-base-uncased": "86b5e0934494bd15c9632b12f734a8a67f723594",
    "google/siglip-so400m-patch14-384": "9fdffc58afc957d1a03a25b10dba0329ab15c2a3",
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": "1c2b8495b28150b8a4922ee1c8edee224c284c0c",
    "openai/clip-vit-large-patch14": "32bd64288804d66eefd0ccbe215aa642df71cc41",
    "openai/clip-vit-large-patch14-336": "ce19dc912ca5cd21c8a653c79e251e808ccabcd1",
    "stabilityai/stable-diffusion-3.5-medium": "b940f670f0eda2d07fbb75229e779da1ad11eb80",
    "stabilityai/stable-diffusion-xl-base-1.0": "462165984030d82259a11f4367a4eed129e94a7b",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "451f4fe16113bff5a5d2269ed5ad43b0592e9a14",
    "xswu/HPSv2": "697403c78157020a1ae59d23f111aa58ced35b0a",
    "yuvalkirstain/PickScore_v1": "a4e4367c6dfa7288a00c550414478f865b875800",
}

_used: dict[str, str] = {}


def split(source: str) -> tuple[str, str | None]:
    """Split a source into (owner/repo, revision); revision is None where the newest is asked for.

    No text after the @ -> ValueError.
    """
    name, at, revision = source.partition("@")
    if at and not revision.strip():
        raise ValueError(
            f'"{source}" has nothing after the @; give a branch, a tag or a commit, or leave it out'
        )
    return name, revision or PINNED.get(name)


def options(source: str) -> dict[str, str]:
    """Options that from_pretrained and similar functions take beside the name: {"revision": ...},
    or none."""
    revision = split(source)[1]
    return {} if revision is None else {"revision": revision}


def note(source: str, *, dataset: bool = False) -> None:
    """Remember the commit of what was just loaded from the hub; this machine's cache knows it."""
    name, revision = split(source)
    revision = revision or "main"
    _used[f"datasets/{name}" if dataset else name] = _commit(name, revision, dataset) or revision


def used() -> dict[str, str]:
    """The repositories that this process has loaded, each with its commit, or with its revision
    where the cache does not know the commit."""
    return dict(sorted(_used.items()))


def _commit(name: str, revision: str, dataset: bool) -> str | None:
    from huggingface_hub import constants

    if COMMIT.fullmatch(revision):
        return revision
    folder = f"{'datasets' if dataset else 'models'}--{name.replace('/', '--')}"
    known = Path(constants.HF_HUB_CACHE) / folder / "refs" / revision
    try:
        return known.read_text(encoding="utf-8").strip()
    except OSError:
        return None
