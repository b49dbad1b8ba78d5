# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder becomes an archive and the same folder again, and its hash says when it is another one."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import code


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "pkg").mkdir(parents=True)
    (root / "main.py").write_text("print(1)\n")
    (root / "run é.sh").write_text("#!/bin/sh\n")
    (root / "run é.sh").chmod(0o700)
    (root / "pkg" / "x.py").write_bytes(bytes(range(256)))
    (root / "pkg" / "up").symlink_to("../main.py")
    (root / "empty").mkdir()
    return root


def send(root, exclude=()):
    entries = code.scan(str(root), exclude)
    stream = io.BytesIO()
    code.write_archive(str(root), entries, stream)
    return entries, stream.getvalue()


def arrive(data, folder):
    archive = folder / "archive"
    archive.write_bytes(data)
    target = folder / "target"
    target.mkdir()
    return target, code.unpack(str(archive), str(target))


def test_a_folder_arrives_as_it_was(tree, tmp_path):
    entries, data = send(tree)
    target, arrived = arrive(data, tmp_path)
    assert arrived == entries == code.scan(str(target), ())
    assert code.tree_hash(str(target), arrived) == code.tree_hash(str(tree), entries)
    assert (target / "pkg" / "x.py").read_bytes() == bytes(range(256))
    assert (target / "pkg" / "up").readlink().as_posix() == "../main.py"
    assert {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()} == {
        "main.py": 0o644,
        "run é.sh": 0o755,
        "pkg": 0o755,
        "empty": 0o755,
    }


def test_the_same_folder_gives_the_same_bytes(tree):
    first = send(tree)
    os.utime(tree / "main.py", (0, 0))
    (tree / "main.py").chmod(0o600)
    assert send(tree) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "main.py").write_text("print(2)\n"),
        lambda root: (root / "main.py").chmod(0o755),
        lambda root: (root / "main.py").rename(root / "other.py"),
        lambda root: (root / "new").mkdir(),
        lambda root: ((root / "pkg" / "up").unlink(), (root / "pkg" / "up").symlink_to("x.py")),
        lambda root: ((root / "empty").rmdir(), (root / "empty").write_text("")),
    ],
)
def test_every_change_changes_the_hash(tree, change):
    before = code.tree_hash(str(tree), code.scan(str(tree), ()))
    change(tree)
    assert code.tree_hash(str(tree), code.scan(str(tree), ())) != before


def test_what_is_excluded_neither_travels_nor_counts(tree):
    before = code.scan(str(tree), ["*.pt", ".git"])
    (tree / ".git").mkdir()
    (tree / ".git" / "HEAD").write_text("x")
    (tree / "pkg" / "big.pt").write_text("x")
    (tree / "pkg" / "__pycache__").mkdir()
    assert code.scan(str(tree), ["*.pt", ".git"]) == before


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "pkg/../../outside"])
def test_a_link_out_of_the_folder_is_refused(tree, target):
    (tree / "link").symlink_to(target)
    with pytest.raises(code.CodeError, match=f"link is a link to {target}, out of the folder. Put a copy there"):
        code.scan(str(tree), ())


def test_a_pipe_is_refused(tree):
    os.mkfifo(tree / "pipe")
    with pytest.raises(code.CodeError, match="pipe is neither a file, a folder nor a link"):
        code.scan(str(tree), ())


@pytest.mark.parametrize("name", ["../x", "/x", "pkg/../../x"])
def test_an_archive_does_not_write_outside(tmp_path, name):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(code.CodeError, match="outside of the folder"):
        arrive(stream.getvalue(), tmp_path)
    assert not (tmp_path / "x").exists()


def test_an_archive_does_not_write_through_a_link(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "victim")
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("link"))
    with pytest.raises(FileExistsError):
        arrive(stream.getvalue(), tmp_path)
    assert not (tmp_path / "victim").exists()


def test_a_large_file_does_not_go_through_memory(tmp_path):
    root = tmp_path / "large"
    root.mkdir()
    with open(root / "weights", "wb") as stream:
        stream.truncate(64 << 20)
    tracemalloc.start()
    entries = code.scan(str(root), ())
    code.tree_hash(str(root), entries)
    with open(tmp_path / "archive", "wb") as stream:
        code.write_archive(str(root), entries, stream)
    (tmp_path / "target").mkdir()
    code.unpack(str(tmp_path / "archive"), str(tmp_path / "target"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # zlib turns a 10 KiB block of the stream into 10 MiB of zeros at most.
    assert peak < 16 << 20


def test_entries_survive_a_listing(tree):
    entries = code.scan(str(tree), ())
    assert [code.Entry.parse(entry.line()) for entry in entries] == entries
