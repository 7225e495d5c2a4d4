"""How an extra is installed from here, for messages, and a foreign package of the same name.

The distribution is called flowrl-align and is on no package index yet. `flowrl` on PyPI is another
project's, with the same import name, so that no message may tell anyone to install it by name.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from netrc import netrc
from pathlib import Path
from urllib.parse import urlsplit

import flowrl
from flowrl.runtime.registry import did_you_mean

EXTRAS = {  # imported package -> extra that installs it
    "av": "video",
    "bitsandbytes": "quantize",
    "datasets": "datasets",
    "lpips": "lpips",
    "paddleocr": "paddle",
    "pyarrow": "parquet",
    "rapidocr_onnxruntime": "ocr",
    "torchao": "quantize",
    "uvicorn": "server",
    "swanlab": "swanlab",
    "trackio": "trackio",
    "wandb": "wandb",
}
# trackers of accelerate, each by the name of its package
TRACKERS = (
    *("all", "aim", "clearml", "comet_ml", "dvclive"),
    *("mlflow", "swanlab", "tensorboard", "trackio", "wandb"),
)
ROOT = Path(__file__).resolve().parents[2]  # folder of the checkout; for a wheel, of its packages
COMMAND = "flowrl.cli.main:main"  # entry point of this distribution, also under its former name


def install_line(extra: str) -> str:
    """Return the command that installs an extra into the Python that runs, from its checkout or a
    wheel's file."""
    pip, python = shutil.which("pip"), Path(sys.executable)
    # another Python's pip would install elsewhere
    ours = pip is not None and Path(pip).parent == python.parent
    said = "pip" if ours else f"{shlex.quote(sys.executable)} -m pip"
    if not (ROOT / "pyproject.toml").is_file():
        wheel = f"path/to/flowrl_align-{flowrl.__version__}-py3-none-any.whl"
        return f"{said} install {shlex.quote(f'{wheel}[{extra}]')}"
    root = "." if os.path.samefile(".", ROOT) else str(ROOT)
    return f"{said} install -e {shlex.quote(f'{root}[{extra}]')}"


def line_for(package: str | None) -> str | None:
    """Return the command that installs a package which an extra brings, by its import name."""
    extra = EXTRAS.get((package or "").partition(".")[0])
    return install_line(extra) if extra else None


def check_trackers(names: Sequence[str]) -> None:
    """ValueError for a tracker that accelerate does not know, that is not installed, or that would
    ask for an account."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f'trackers: unknown tracker "{name}"{did_you_mean(name, TRACKERS)}')
        if name != "all" and find_spec(name) is None:
            install = line_for(name) or f"pip install {name}"
            raise ValueError(f"trackers: {name} is not installed; {install}, or leave it out")
        online = os.environ.get("WANDB_MODE", "online") == "online"
        if online and name in ("all", "wandb") and find_spec("wandb"):
            _check_account()


def _check_account() -> None:
    """ValueError where W&B would ask for an account, without a question and without a request."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    found, logins = wandb.setup().settings, Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    token = found.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not token and logins.is_file():  # where `wandb login` writes
        token = netrc(logins).authenticators(str(urlsplit(found.base_url).hostname))
    if found.mode == "online" and not token:
        what = "run `wandb login`, or set WANDB_MODE=offline in the environment"
        raise ValueError(f"trackers: wandb is not logged in; {what}, which sends nothing")


def foreign() -> str | None:
    """Say that another project's distribution `flowrl` is installed beside this one; None: none."""
    try:
        found = importlib.metadata.distribution("flowrl")
    except importlib.metadata.PackageNotFoundError:
        return None
    if any(point.value == COMMAND for point in found.entry_points):
        return None  # this package, installed before its name changed
    return (
        f"the package flowrl {found.version} in {found.locate_file('flowrl')} is another project's"
        " and has the same import name as this one (flowrl-align), so that files of both may be"
        " mixed; run pip uninstall flowrl flowrl-align, then install this one again"
    )
