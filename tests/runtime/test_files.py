"""Files are whole or as they were, whatever fails, and nobody writes them otherwise."""

import ast
import errno
import os
import stat
from multiprocessing import get_context
from pathlib import Path

import pytest

from flowrl.runtime.store import files, lines
from flowrl.runtime.store.files import TEMPORARY, WriteError

ROOT = Path(__file__).resolve().parents[2]


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_is_written_with_its_folders_and_the_permissions_of_any_other(tmp_path):
    path = files.write(tmp_path / "a" / "b.json", "é")
    (tmp_path / "plain").write_text("")
    assert path.read_bytes() == "é".encode() and names(path.parent) == ["b.json"]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_what_has_not_changed_is_not_written_again(tmp_path):
    path = files.write(tmp_path / "a", "1")
    before = path.stat()
    assert files.write(path, "1").stat().st_ino == before.st_ino
    assert files.write(path, "2").stat().st_ino != before.st_ino


def test_a_link_stays_one(tmp_path):
    link, target = tmp_path / "link", files.write(tmp_path / "disk" / "file", "1")
    link.symlink_to(target)
    files.write(link, "2")
    assert link.is_symlink() and target.read_text() == "2"


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_a_full_disk_leaves_the_file_as_it_was_and_is_one_sentence(
    tmp_path, monkeypatch, operation
):
    path = files.write(tmp_path / "report.html", "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, failing(errno.ENOSPC))
        with pytest.raises(WriteError) as error:
            files.write(path, "after")
    assert path.read_text() == "before" and names(tmp_path) == ["report.html"]
    assert str(error.value) == (
        f"{path} could not be written (No space left on device), so what was there is unchanged;"
        " free some space on this disk and try again"
    )


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "make its folder writable, or choose another one, and try again"),
        (errno.EIO, "look at the disk and try again"),
    ],
)
def test_the_sentence_says_what_to_do(tmp_path, monkeypatch, number, advice):
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(WriteError, match=advice):
        lines.append(tmp_path / "metrics.jsonl", [{}])


def test_a_file_in_place_of_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "suites").write_text("")
    with pytest.raises(WriteError, match="shapes.json could not be written .*; give another path"):
        files.write(tmp_path / "suites" / "shapes.json", "{}")


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "checkpoints" / "step-000001"
    with files.replacing_folder(place) as folder:
        files.write(folder / "meta.json", "1")
        assert not place.exists()
    assert names(tmp_path / "checkpoints") == ["meta.json", "step-000001"]
    refused = pytest.raises(WriteError, match=f"{place} could not be written")
    with monkeypatch.context() as patch, refused, files.replacing_folder(place) as folder:
        patch.setattr(os, "write", failing(errno.ENOSPC))
        files.write(folder / "meta.json", "2")
    assert names(tmp_path / "checkpoints") == ["meta.json", "step-000001"]
    with files.replacing_folder(place) as folder:
        files.write(folder / "other.json", "3")
    assert names(tmp_path / "checkpoints") == ["other.json", "step-000001"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '{"a": 3}\n'),
        ('{"a": 1}\n', '{"a": 1}\n{"a": 3}\n'),
        ('{"a": 1}\n{"a": ', '{"a": 1}\n{"a": 3}\n'),  # of a killed process
        ('{"a": ', '{"a": 3}\n'),
        ("[" * 100_000, '{"a": 3}\n'),  # deeper than a parser of JSON goes
        ('{"a": 1}', '{"a": 1}\n{"a": 3}\n'),  # of an editor
    ],
)
def test_appending_mends_the_last_line(tmp_path, before, after):
    (tmp_path / "x.jsonl").write_text(before)
    lines.append(tmp_path / "x.jsonl", [{"a": 3}])
    assert (tmp_path / "x.jsonl").read_text() == after


def test_a_line_for_which_there_is_no_room_leaves_no_part_of_it(tmp_path, monkeypatch):
    path, write = tmp_path / "x.jsonl", os.write
    lines.append(path, [{"a": 1}])

    def half(handle, data):
        write(handle, bytes(data)[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(WriteError, match=r"x.jsonl could not be written \(No space"):
        lines.append(path, [{"a": 2}])
    assert path.read_text() == '{"a": 1}\n'


def _append(path, letter):
    for _ in range(50):
        lines.append(path, [{letter: letter * 3000}])


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path, fork = tmp_path / "x.jsonl", get_context("fork")
    writers = [fork.Process(target=_append, args=(path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = [line.row for line in lines.read(path)]
    assert sorted(rows, key=str) == [{"a": "a" * 3000}] * 50 + [{"b": "b" * 3000}] * 50


def test_leftovers_of_dead_processes_are_removed_and_others_are_not(tmp_path):
    child = get_context("fork").Process(target=lambda: None)
    child.start()
    child.join()
    (tmp_path / "below").mkdir()
    host = os.uname().nodename
    dead = f"{TEMPORARY}{host}-{child.pid}-0123abcd"
    kept = [f"{TEMPORARY}{host}-{os.getpid()}-0123abcd", f"{TEMPORARY}else-{child.pid}-0123abcd"]
    for name in [dead, *kept, ".tmp-mine", f"below/{dead}"]:
        (tmp_path / name).touch()
    files.clean(tmp_path)
    assert names(tmp_path) == sorted([*kept, ".tmp-mine", "below", dead])
    files.clean(tmp_path, owned=True)
    assert names(tmp_path) == [".tmp-mine", "below"]


# ---------------------------------------------------------------------------
# nobody writes otherwise

WRITERS = {"write_text", "write_bytes", "save", "save_file", "save_pretrained", "savez"}
WRITERS |= {"copyfile", "copy", "copy2", "copytree", "move", "open", "replace", "rename", "link_to"}
NOT_FILES = {"save", "safetensors.torch.save"}  # makes bytes
NOT_FILES |= {
    f"{ours}.save" for ours in ("checkpoint", "state", "self", "trainer", "lora", "heads", "media")
}
ALLOWED = {
    "flowrl/runtime/store/files.py": "the place where files are written",
    "flowrl/runtime/store/lines.py": "lines are appended in one write",
    "flowrl/runtime/store/lock.py": "a lock file is opened, and another one would not be locked",
    "flowrl/runtime/store/checkpoint.py: folder.rename": "one folder is renamed, which is atomic",
    "flowrl/shapes/build.py": "a temporary folder, gone before the function returns",
    "flowrl/data/media.py: av.open": "a temporary name that files.replacing gave",
    "flowrl/runtime/streams.py: os.open": "/dev/null stands for a closed stream",
    "flowrl/policy/weights/merged.py: type(module).save_pretrained": "users call save_pretrained",
    "flowrl/policy/modular.py: own.save_pretrained": "users call save_pretrained",
    "flowrl/export/weights.py: pipe.save_pretrained": "into a folder that is renamed when whole",
    "rewards/judge/client.py: file.open": "a test whether a log can be written, nothing is",
    "rewards/networks/bradley_terry.py": "a script converts published weights once, into no run",
}


def writes(path):
    """The calls of a file of source that may write a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        called = name.rpartition(".")[2]
        reads = called == "open" and name != "os.open" and _reads(node)
        if called not in WRITERS or name in NOT_FILES or reads:
            continue
        in_memory = any(ast.unparse(value) == "buffer" for value in node.args)
        if not in_memory and (called not in ("replace", "copy") or name.startswith("os.")):
            yield name


def _reads(node):
    modes = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if _is_text(a)]
    return not any(
        mode and set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes
    )


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_file_is_written_by_files_py_but_for_listed_reasons():
    found = set()
    for folder in ("flowrl", "rewards", "samplers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for call in writes(path):
                key = name if name in ALLOWED else f"{name}: {call}"
                assert key in ALLOWED, f"{name} calls {call}; write through runtime/store/files.py"
                found.add(key)
    assert found == ALLOWED.keys(), "reasons without a call"


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text(x)",
        "open(path, 'w')",
        "path.open(mode='ab')",
        "torch.save(x, path)",
        "image.save(path)",
        "np.savez(path, x)",
        "os.replace(a, b)",
        "shutil.copyfile(a, b)",
    ],
)
def test_a_bare_write_is_found(tmp_path, source):
    (tmp_path / "x.py").write_text(source)
    assert list(writes(tmp_path / "x.py"))
    (tmp_path / "x.py").write_text(
        "text.replace(a, b); open(path); path.open('rb'); trainer.save(); torch.save(x, buffer)"
    )
    assert not list(writes(tmp_path / "x.py"))
