"""`flowrl env`: facts about this machine that a bug report should hold."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from contextlib import suppress

from flowrl.cli.common import Json, as_json, echo
from flowrl.runtime.install import EXTRAS

OPTIONAL = ("xformers", "flash-attn", "triton", "torchao", "bitsandbytes", "deepspeed")


def env(json: Json = None) -> None:
    """Print versions, devices and back ends, for bug reports."""
    from flowrl.runtime import log
    from flowrl.runtime.store.run_folder import environment

    log.hush()  # keeps libraries quiet
    found = environment() | _devices()
    for package in OPTIONAL:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    has = {extra: importlib.util.find_spec(module) for module, extra in EXTRAS.items()}
    found["extras"] = ", ".join(sorted(extra for extra, spec in has.items() if spec)) or "none"
    if not as_json(found, json):
        width = max(map(len, found))
        echo("\n".join(f"{name:{width}} {value}" for name, value in found.items()))


def _devices() -> dict[str, str]:
    """Devices with their memory, the C++ compiler, and the attention that works on the first."""
    import torch
    from diffusers.models.attention_dispatch import AttentionBackendName

    from flowrl.policy.weights.attention import try_out

    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = {
        f"cuda:{i}": f"{c.name}, {c.total_memory / 2**30:.1f} GiB" for i, c in enumerate(cards)
    }
    where, dtype = ("cuda", torch.bfloat16) if cards else ("cpu", torch.float32)
    works = []
    for backend in AttentionBackendName:
        if not backend.value.startswith("_"):
            with suppress(ValueError):
                try_out(backend, torch.device(where), dtype)
                works.append(backend.value)
    found["cuda"] = f"{torch.version.cuda}" if cards else "no GPU"
    found["compiler"] = next(filter(shutil.which, ("g++", "clang++")), "none")
    return found | {"attention": ", ".join(works)}
