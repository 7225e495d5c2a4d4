"""Answers of text encoders on disk (model.prompt_cache), for later runs and other processes.

A file holds the tensors that are read from the answer to one row of tokens, as safetensors. Its
name is a hash of all that the answer depends on: the encoder's weights to the last bit, its
configuration and type, the tokens (the prompt, or a negative one, cut or padded to its length) and
the other arguments, autocast, the kind of device and the versions of torch and transformers. So a
hit has the bits that the encoder would give, and no file ever has to be declared old. If a pipeline
reads more than another one did, the prompt is encoded again and the file holds both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from flowrl.runtime.log import logger
from flowrl.runtime.paths import located
from flowrl.runtime.store import files

FORMAT = 2
MARK = "flowrl"  # key of the file's metadata that describes its tensors
KEPT = 0.9  # share of the limit that stays when the oldest files are removed
# words in a description for which torch would import a module
IMPORTING = re.compile("__enum__|default_factory")
# entries of a configuration that change no number
PASSING = ("_name_or_path", "transformers_version")


class Damaged(ValueError):
    """A file differs from what was written."""


class PromptCache:
    """The answers in a folder, at most `most_gb` (2**30 bytes each): above that, the least recently
    used ones are removed. Processes may share it."""

    setting = "model.prompt_cache"  # setting that names the folder
    kept = "prompt"  # what an answer is about

    def __init__(self, folder: str | Path, most_gb: float = 20.0) -> None:
        self.folder, self.most = located(folder).absolute(), most_gb * 2**30
        self.written, self.full = self.most, False  # bytes written since the folder was last tidied
        # id of a network -> (the network, its hash)
        self.known: dict[int, tuple[nn.Module, str]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self.setting}={folder} cannot be made a folder ({error.strerror}); give"
                " another path, or leave it out"
            ) from error
        files.clean(self.folder)

    def key(self, network: nn.Module, method: str, content: Any, device: torch.device) -> str:
        """Return the name of an answer. content: a key of the arguments, equal for equal ones."""
        if id(network) not in self.known:
            self.known[id(network)] = (network, fingerprint(network))
        causes = (FORMAT, self.known[id(network)][1], method, content, surroundings(device))
        return hashlib.sha256(repr(causes).encode()).hexdigest()

    def get(self, key: str) -> Any | None:
        """Read an answer to host memory; None if there is none, or it is damaged."""
        path = self._path(key)
        try:
            answer = read(path, key)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            logger.warning(f"{path} is damaged ({error}); its {self.kept} is encoded again")
            return None
        with suppress(OSError):
            os.utime(path)  # mark the file as used now
        return answer

    def put(self, key: str, answer: Any) -> None:
        """Store an answer, if a file can hold all its values."""
        if self.full or (content := packed(key, answer)) is None or len(content) > self.most:
            return
        try:
            files.write(self._path(key), content)
        except files.WriteError as error:
            self.full = True
            logger.warning(f"{self.setting}: {error}; the run goes on and stores no more")
            return
        self.written += len(content)
        if self.written > self.most * (1 - KEPT):
            self.tidy()

    def tidy(self) -> None:
        """Remove the least recently used files, if all together are too large."""
        found = []
        for path in self.folder.glob("*/*.safetensors"):
            with suppress(OSError):  # another process may have removed the file
                known = path.stat()
                found.append((known.st_mtime, known.st_size, path))
        size = sum(size for _, size, _ in found)
        if size > self.most:
            for _, own, path in sorted(found):
                if size <= self.most * KEPT:
                    break
                with suppress(OSError):
                    path.unlink()
                size -= own
        self.written = 0

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def fingerprint(network: nn.Module) -> str:
    """Hash a network's class, configuration, and every bit of its weights."""
    state = {name: t for name, t in network.state_dict().items() if isinstance(t, Tensor)}
    with ThreadPoolExecutor() as pool:  # threads help, because hashing lets other threads run
        hashes = list(pool.map(bits, state.values()))
    config = getattr(network, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    settings = {k: v for k, v in settings.items() if k not in PASSING}
    kind = f"{type(network).__module__}.{type(network).__qualname__}"
    attention = getattr(config, "_attn_implementation", None)
    lines = [kind, attention, json.dumps(settings, sort_keys=True, default=str)]
    lines += [f"{name} {value}" for name, value in zip(state, hashes, strict=True)]
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


def bits(t: Tensor) -> str:
    """Hash a tensor's type, shape and values."""
    raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    hashed = hashlib.sha256(f"{t.dtype} {tuple(t.shape)} ".encode())
    hashed.update(memoryview(raw))
    return hashed.hexdigest()


def surroundings(device: torch.device) -> tuple[Any, ...]:
    """Return the other facts on which the last bits of an answer depend."""
    where: Any = torch.get_num_threads()
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    precision = torch.get_float32_matmul_precision()
    return (torch.__version__, transformers.__version__, device.type, where, precision)


def packed(key: str, answer: Any) -> bytes | None:
    """Pack an answer into the bytes of a file; None if it holds other values than tensors, plain
    values, lists, mappings and records of outputs."""
    tensors: dict[str, Tensor] = {}
    entries, structure = tree_flatten(answer)
    try:
        description = {"key": key, "answer": treespec_dumps(structure)}
        description |= {"entries": [_described(entry, tensors) for entry in entries]}
    except (TypeError, NotImplementedError):
        return None
    # one metadata entry: several are written in any order, and equal answers should be equal files
    return save(dict(sorted(tensors.items())), {MARK: json.dumps(description)})


def read(path: Path, key: str) -> Any:
    """Read the answer in a file; Damaged if it is not the one that was written under this name."""
    with safe_open(str(path), framework="pt") as file:
        description = json.loads((file.metadata() or {}).get(MARK, "{}"))
        if description.get("key") != key:
            raise Damaged("it is another answer")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if bits(tensor) != name:
            raise Damaged("values were changed")
    try:
        if IMPORTING.search(description["answer"]):
            raise Damaged("its structure names a module")
        entries = [_built(entry, tensors) for entry in description["entries"]]
        return tree_unflatten(entries, treespec_loads(description["answer"]))
    except (KeyError, TypeError, AttributeError, NotImplementedError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _described(value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe a value in JSON; a tensor by its hash, so that equal ones are stored once."""
    if isinstance(value, Tensor) and value.is_meta:  # no pipeline reads its values
        return {"unread": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, Tensor):
        name = bits(value)
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(type(value).__name__)


def _built(description: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Build a value from its description."""
    if "unread" in description:
        shape, dtype = description["unread"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return tensors[description["tensor"]] if "tensor" in description else description["value"]
