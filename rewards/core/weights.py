"""Weights and prompt templates of rewards: from a path, or by a hub's name.

Files are read as tensors only, never as pickles; every key is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowrl.runtime import hub
from flowrl.runtime.paths import located, nearby

T = TypeVar("T")

# vocabulary files: every folder with a tokenizer holds one of them
VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"}
FILES = (".pt", ".pth", ".safetensors", ".bin", ".txt")  # endings that no repository of the hub has


def path_of(
    source: str,
    file: str | None = None,
    *,
    reward: str,
    setting: str = "weights",
    only: list[str] | None = None,
    beside: str | None = None,
) -> Path:
    """Find a file or folder on this machine: `source` if it exists, else "owner/repo" of the hub,
    or "owner/repo@revision".

    file: name of a file in the folder or repository; None: all of it. only: patterns of files to
    fetch from a whole repository, which often holds its weights in several forms. beside: another
    file that the reward reads from the same folder. A missing file -> ValueError that says what to
    fetch and where to put it.
    """
    local = _local(source, file, reward, setting)
    if local is not None:
        return local
    try:
        return _fetched(source, file, only)
    except Exception as error:  # the hub's client raises many kinds: no network, a gate, no room
        what, put = file, None
        if beside:
            what, put = f"{file} and {beside}", "/path/to/the folder with both"
        raise unfetched(source, what, reward, setting, error, put=put) from error


def _fetched(source: str, file: str | None, only: list[str] | None) -> Path:
    """A file or a whole repository of the hub, on this machine."""
    from huggingface_hub import hf_hub_download, snapshot_download

    name, revision = hub.split(source)
    if file:
        found = hf_hub_download(name, file, revision=revision)
    else:
        found = snapshot_download(name, revision=revision, allow_patterns=only)
    hub.note(source)
    return Path(found)


def network(
    cls: Any,
    source: str,
    *,
    reward: str,
    setting: str = "weights",
    ignore: tuple[str, ...] = (),
    absent: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A network of transformers from a folder or a hub's name (only the files that it needs),
    frozen, in eval mode.

    A missing, surplus or misshapen key -> ValueError that names some. ignore: beginnings of keys
    that may be surplus (the other tower); absent: beginnings of keys that may be missing.
    """
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}

    def load(place: str, **revision: str) -> Any:
        with _quiet():
            return cls.from_pretrained(place, **revision, **options)

    module, info = from_folder_or_hub(load, source, reward=reward, setting=setting)
    surplus = [key for key in info["unexpected_keys"] if not key.startswith(ignore)]
    # transformers only warns of keys that do not fit: a head would be left at random.
    misfit = Misfit(
        missing=[key for key in info["missing_keys"] if not key.startswith(absent)],
        surplus=[key for key in surplus if not key.endswith("position_ids")],
        shapes=[_shapes(key, got, own) for key, got, own in info["mismatched_keys"]],
    )
    misfit.check(source, cls.__name__)
    return module.eval().requires_grad_(False)


def tokenizer(cls: Any, source: str, *, reward: str, setting: str = "weights") -> Any:
    """A tokenizer of transformers from a folder or a hub's name; without a vocabulary: ValueError
    that names the files to add.

    Where transformers 5 finds no files, it makes a tokenizer of special tokens alone (for T5, the
    blank, too), and says nothing.
    """
    local = _local(source, None, reward, setting)
    lacking = ValueError(
        f"reward.{reward}.{setting}={source} holds no vocabulary of a tokenizer; add"
        f" {_vocabulary_of(cls)} of the model to that folder"
    )
    files = {path.name for path in local.iterdir()} if local and local.is_dir() else VOCABULARIES
    if not files & VOCABULARIES:
        raise lacking
    found = from_folder_or_hub(cls.from_pretrained, source, reward=reward, setting=setting)
    if found.get_vocab().keys() - {*found.all_special_tokens, "▁"}:
        return found
    if local is None:
        raise unfetched(source, None, reward, setting, FileNotFoundError())
    raise lacking


def _vocabulary_of(cls: Any) -> str:
    """The files that a class of tokenizers reads, as a reader would name them."""
    names = dict(getattr(cls, "vocab_files_names", None) or {"vocab_file": "tokenizer.model"})
    one = names.pop("tokenizer_file", "tokenizer.json")
    return " or ".join([one, *([" and ".join(names.values())] if names else [])])


def from_folder_or_hub(
    load: Callable[..., T], source: str, *, reward: str, setting: str = "weights"
) -> T:
    """Call load(folder) or load("owner/repo", revision=...) of a library that fetches files by
    itself; its errors become one ValueError."""
    local = _local(source, None, reward, setting)
    try:
        if local is not None:
            return load(str(local))
        found = load(hub.split(source)[0], **hub.options(source))
        hub.note(source)
        return found
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        if local is None:
            raise unfetched(source, None, reward, setting, error) from error
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"reward.{reward}.{setting}={source} cannot be loaded: {type(error).__name__}: {first}"
        ) from error


def _local(source: str, file: str | None, reward: str, setting: str) -> Path | None:
    """Path that `source` names on this machine; None: a name on the hub; ValueError: neither."""
    local = located(source)
    if local.is_dir() and file is not None:
        local = local / file
    if local.exists():
        return local
    if on_hub(source):
        return None
    where = f" ({local})" if str(local) != source else ""
    raise ValueError(
        f"reward.{reward}.{setting}={source}: there is no such file or folder{where}{nearby(local)}"
    )


def on_hub(source: str) -> bool:
    """Whether `source` is a name on the hub: neither a path nor a folder of this machine."""
    name = hub.split(source)[0]
    named = name.count("/") == 1 and not name.startswith((".", "/", "~", "$"))
    return named and Path(name).suffix not in FILES and not Path(source).exists()


def unfetched(
    source: str,
    file: str | None,
    reward: str,
    setting: str,
    error: Exception,
    *,
    put: str | None = None,
) -> ValueError:
    """The sentence about `file` of the hub's repository `source` (None: all of it).

    put: the setting's value for what was downloaded.
    """
    what, name = f"{file} of {source}" if file else source, hub.split(source)[0]
    put = put or f"/path/to/{file or 'the folder'}"
    return ValueError(
        f"reward {reward} needs {what}, which is not on this machine and could not be fetched"
        f" ({type(error).__name__}); download it from https://huggingface.co/{name} and set"
        f" reward.{reward}.{setting}={put}"
    )


def fetch_open_clip(model: str, tag: str, *, reward: str, setting: str) -> None:
    """Make sure that the weights with this tag of open_clip are on this machine.

    Where open_clip fetches them itself, it logs an error of its own.
    """
    import open_clip

    config = open_clip.get_pretrained_cfg(model, tag)
    try:
        open_clip.download_pretrained(config)
    except Exception as error:  # the hub's client raises many kinds, and open_clip one more
        repository, _, file = config["hf_hub"].rpartition("/")
        file = file or "open_clip_pytorch_model.bin"
        raise unfetched(repository, file, reward, setting, error) from error
    if config.get("hf_hub"):
        hub.note(f"{config['hf_hub'].rpartition('/')[0]}@main")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the table that transformers prints of keys that do not fit."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def tensors(path: Path, *, under: str | None = None) -> dict[str, Tensor]:
    """The state dict in a .safetensors or torch file, on CPU.

    under: the key that holds it where the file has others too. A torch file is read with
    weights_only: one that holds more than tensors and plain containers -> ValueError.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file in it that holds the weights")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    found = _torch_file(path)
    if under is not None and isinstance(found, Mapping) and under in found:
        found = found[under]
    is_state = isinstance(found, Mapping) and all(isinstance(v, Tensor) for v in found.values())
    if not is_state:
        raise ValueError(
            f"{path} holds a {type(found).__name__}, expected a state dict: names and tensors"
        )
    return dict(found)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or only a part of one ({error}); fetch it again"
        ) from error


def _torch_file(path: Path) -> Any:
    """The contents of a torch file, read without running code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is not a file of tensors, or it could run code when opened; convert it"
            " once, where you trust it, to .safetensors"
        ) from error


def fill(
    module: nn.Module, state: Mapping[str, Tensor], *, path: object, ignore: tuple[str, ...] = ()
) -> nn.Module:
    """Load state into module, frozen and in eval mode; a missing, surplus or misshapen key ->
    ValueError that names some.

    ignore: beginnings of keys that may be missing or surplus (buffers that libraries compute).
    """
    own = {key: value for key, value in module.state_dict().items() if not key.startswith(ignore)}
    state = {key: value for key, value in state.items() if not key.startswith(ignore)}
    both = [key for key in own.keys() & state.keys() if state[key].shape != own[key].shape]
    misfit = Misfit(
        missing=[key for key in own if key not in state],
        surplus=[key for key in state if key not in own],
        shapes=[_shapes(key, state[key].shape, own[key].shape) for key in both],
    )
    misfit.check(path, type(module).__name__)
    module.load_state_dict(state, strict=False)
    return module.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Keys of a state dict that a module lacks, does not know, or has in another shape."""

    missing: list[str]  # keys that the module has and the file does not
    surplus: list[str]  # keys that the file has and the module does not
    shapes: list[str]  # keys with different shapes, each with both shapes

    def check(self, source: object, module: str) -> None:
        """Raise ValueError that names some of the keys, if there are any."""
        kinds = {
            "keys missing": self.missing,
            "unknown keys": self.surplus,
            "tensors of another shape": self.shapes,
        }
        problems = []
        for what, keys in kinds.items():
            some = ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")
            problems += [f"{len(keys)} {what} ({some})"] if keys else []
        if problems:
            raise ValueError(f"{source} does not fit {module}: {'; '.join(problems)}")


def _shapes(key: str, got: Sequence[int], own: Sequence[int]) -> str:
    return f"{key} {tuple(got)} instead of {tuple(own)}"


def template(
    path: str | Path | None, *, sha256: str, reward: str, setting: str = "template", origin: str
) -> str:
    """A prompt text that belongs to a model, read from a file: we ship no such texts.

    sha256: the beginning of its digest in hex. origin: where the text is found, named where `path`
    is missing or holds another text. A newline at the end of the file is dropped when the text fits
    only without it.
    """
    if path is None:
        raise ValueError(
            f"reward {reward} needs its model's own prompt text: save {origin} as a text file and"
            f" set reward.{reward}.{setting}=/path/to/it"
        )
    file = located(path)
    if not file.is_file():
        raise ValueError(
            f"reward.{reward}.{setting}={path}: there is no such file{nearby(file)}; save"
            f" {origin} there"
        )
    raw = file.read_bytes()
    for data in (raw, raw.removesuffix(b"\n")):
        if hashlib.sha256(data).hexdigest().startswith(sha256):
            return data.decode()
    got = hashlib.sha256(raw).hexdigest()[: len(sha256)]
    raise ValueError(
        f"{file} is not the text that the model was trained with: sha256 {got}..., expected"
        f" {sha256}... ({origin})"
    )
