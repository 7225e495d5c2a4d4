"""Check the requests of a launcher, and the processes it started, before anything is built.

accelerate reads many variables ACCELERATE_* of the environment, which its launcher sets; those that
would change what a run computes are refused, since a run is what its config says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from flowrl.runtime.log import logger

ON = ("1", "true", "yes", "y", "on", "t")
# families of variables that accelerate's launcher sets
PLUGINS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
# ACCELERATE_NAME -> (values that change nothing, why others are refused and what to do)
CHANGES = {
    "GRADIENT_ACCUMULATION_STEPS": (
        ("1",),
        "divides gradients, and an update here sums its micro-batches whatever their number; leave"
        " it out, and set batch.micro (rows in a forward) and batch.updates (updates an iteration)",
    ),
    "GRADIENT_CLIPPING": (
        ("", "none"),
        "is not read here; leave it out, and set optimizer.max_grad_norm",
    ),
    "DYNAMO_BACKEND": (
        ("", "no"),
        "compiles models that accelerate prepares, and flowrl's are not; leave it out, and set"
        " train.compile=blocks",
    ),
}


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable of the environment says yes, as accelerate reads it."""
    return environment.get(name, "").lower() in ON


def launched() -> int:
    """The number of processes that a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the first process of a launcher, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def check_launcher(environment: Mapping[str, str], precision: str | None = None) -> None:
    """Raise ValueError if accelerate's environment asks for something that flowrl does otherwise.

    precision: train.precision of the run; None: nothing is trained.
    """
    for plugin in PLUGINS:
        if is_on(environment, f"ACCELERATE_USE_{plugin}"):
            raise ValueError(
                f"--use_{plugin.lower()} wraps models in a plugin of accelerate, which LoRA on a"
                " replayed pipeline does not fit; launch with --multi_gpu, and set"
                " train.shard=[denoiser] to split the weights"
            )
    for name, (neutral, why) in CHANGES.items():
        value = environment.get(f"ACCELERATE_{name}", neutral[0]).lower()
        if value not in neutral:
            raise ValueError(f"{_said(name, value)} {why}")
    asked = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() or "no"
    if precision is None and asked != "no":
        said = _said("MIXED_PRECISION", asked)
        logger.warning(f"{said} has no effect: networks are in the precision of their run")
    elif asked not in ("no", precision):
        ours = f"set train.precision={asked}" if asked in ("bf16", "fp16") else "leave it out"
        raise ValueError(
            f"{_said('MIXED_PRECISION', asked)} is not read here, and the config has"
            f" train.precision={precision}; {ours}, or launch with --mixed_precision no"
        )


def _said(name: str, value: str) -> str:
    """Name a variable as the option of the launcher and as itself."""
    return f"--{name.lower()}={value} (ACCELERATE_{name} of the environment)"


def check_teams(processes: int, members: int) -> None:
    """Raise ValueError if the processes do not make whole teams."""
    if processes % members:
        raise ValueError(
            f"train.sequence_parallel={members}: {members} processes share each call of the"
            f" network, and {processes} cannot be dealt into such teams; launch a multiple of"
            f" {members}, or leave train.sequence_parallel out"
        )
