"""The wheel works where the repository is not, and the sdist holds what git holds.

    python scripts/bench/installed.py               # torch and the others: this Python's packages
    python scripts/bench/installed.py --download    # everything from the package index, several GB
    python scripts/bench/installed.py --extras UV   # and every extra is resolved, by that uv

Builds both from the files that git knows, compares the sdist's list with git's, installs the wheel
(with --download: the wheel with its extra `server`) into a new environment, and there, in an empty
folder: `flowrl generate`, `flowrl train` for one iteration, `flowrl serve` and a score from it.
Exit code 1 where anything differs or fails. --extras asks the package index, and downloads nothing
but descriptions.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building overwrites sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
TRAIN = "train experiment=quickstart iterations=1 batch.prompts=2 batch.group=4 eval.images=4"
COMMANDS = [  # in this order, in one empty folder
    "generate shapes-sd3 'a red circle' --steps 4 -o circle.png",
    f"{TRAIN} eval.steps=2 output=runs/one",
    "generate runs/one 'a blue square' --steps 4 -o square.png",
]
WRITTEN = ("circle.png", "runs/one/report.html", "runs/one/lora", "square.png")
MADE = re.compile(r"PKG-INFO|setup\.cfg|flowrl_align\.egg-info/.*")  # by building, in an sdist


def tracked() -> set[str]:
    """Files that git knows and that are there."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return {name for name in told.stdout.decode().split("\0") if name and (ROOT / name).is_file()}


def build(folder: Path) -> tuple[Path, Path]:
    """Build sdist and wheel from a copy of what git knows -> their files."""
    copy, dist = folder / "copy", folder / "dist"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-c", BUILD, str(dist)]
    dist.mkdir()
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


def compare(sdist: Path) -> list[str]:
    """What the sdist lacks of git's files, and what it has beside them."""
    with tarfile.open(sdist) as archive:
        names = {file.name.partition("/")[2] for file in archive if file.isfile()}
    held, known = {name for name in names if not MADE.fullmatch(name)}, tracked()
    print(f"sdist: {len(held)} files, git: {len(known)} files, {sdist.stat().st_size / 1e6:.1f} MB")
    lacks = [f"the sdist lacks {name}" for name in sorted(known - held)]
    return lacks + [f"the sdist has {name}, which git does not" for name in sorted(held - known)]


def install(wheel: Path, folder: Path, download: bool) -> Path:
    """Make an environment with the wheel -> its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    scripts, site = Path(paths["scripts"]), Path(paths["purelib"])
    what = [f"{wheel}[server]"] if download else ["--no-deps", str(wheel)]
    subprocess.run(
        [str(scripts / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", *what],
        check=True,
    )
    if not download:
        borrow(site, folder / "borrowed")
    return scripts


def borrow(site: Path, folder: Path) -> None:
    """Show an environment this Python's packages, flowrl and editable installs aside."""
    folder.mkdir()
    for home in {Path(place) for place in sys.path if place.endswith("site-packages")}:
        for entry in home.iterdir():
            ours = "flowrl" in entry.name or entry.suffix == ".pth"
            if not ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{folder}\n")


def run(scripts: Path, words: str, folder: Path) -> None:
    """Run a command of the environment in a folder that is not the repository's."""
    print(f"flowrl {words}", flush=True)
    command = [scripts / "flowrl", *shlex.split(words)]
    subprocess.run(command, cwd=folder, env=clean(), check=True, stdout=subprocess.DEVNULL)


def clean() -> dict[str, str]:
    """This process' variables without those that lead to the repository."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def serve(scripts: Path, folder: Path) -> None:
    """Start a server in the environment, and score a picture by it."""
    print("flowrl serve jpeg --port 0", flush=True)
    command = [scripts / "flowrl", "serve", "jpeg", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=clean(), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = next(found for line in server.stdout if (found := re.search(r"http:\S+", line)))
            run(scripts, f"score circle.png --prompt x --reward remote.url={url[0]}", folder)
        finally:
            server.terminate()


def extras(uv: str) -> None:
    """Let uv find versions for each extra, beside what flowrl needs itself, without installing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--universal"]
        told = subprocess.run(
            [*command, "--extra", extra, "pyproject.toml"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(f"{extra}: {len(told.stdout.splitlines())} packages", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--download", action="store_true", help="Install from the package index.")
    parser.add_argument("--extras", metavar="UV", help="Resolve each extra by this uv.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        sdist, wheel = build(folder)
        wrong = compare(sdist)
        scripts, empty = install(wheel, folder / "environment", given.download), folder / "empty"
        empty.mkdir()
        for words in COMMANDS:
            run(scripts, words, empty)
        serve(scripts, empty)
        wrong += [f"{name} was not written" for name in WRITTEN if not (empty / name).exists()]
        code = "import flowrl; print(flowrl.__file__)"
        command = [scripts / "python", "-c", code]
        file = subprocess.run(command, cwd=empty, env=clean(), stdout=subprocess.PIPE, text=True)
        if not Path(file.stdout.strip()).is_relative_to(folder):
            wrong.append(f"the environment imports {file.stdout.strip()}")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; environment: {size(scripts)}")
    if given.extras:
        extras(given.extras)
    print("\n".join(wrong) or "The wheel works, and the sdist is whole.")
    raise SystemExit(bool(wrong))


def size(scripts: Path) -> str:
    """Gigabytes of an environment; what it borrows by links is not counted."""
    files = (path for path in scripts.parent.rglob("*") if not path.is_symlink() and path.is_file())
    return f"{sum(path.stat().st_size for path in files) / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
