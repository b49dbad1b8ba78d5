# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The zipapp: complete, the same bytes each time, able to build itself, and what a module's payload makes of it."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle

FOLDER = Path(bundle.__file__).parent
IN_ZIP = bundle.PACKAGE.replace(".", "/") + "/"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "launchproof"
    path.write_bytes(bundle.build("%s -IS" % sys.executable))
    path.chmod(0o755)
    return path


def test_every_file_of_the_package_is_in_it():
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py")}
    packed = {name[len(IN_ZIP) :] for name in bundle.sources() if name.startswith(IN_ZIP)}
    assert there - {"__init__.py", "sources/__init__.py"} == packed - {"__init__.py", "sources/__init__.py"}


def test_the_bytes_depend_on_the_sources_alone():
    assert bundle.build() == bundle.build()
    with zipfile.ZipFile(io.BytesIO(bundle.build())) as archive:
        assert {info.date_time for info in archive.infolist()} == {bundle.EPOCH}
        assert archive.namelist() == sorted(archive.namelist())


def test_it_runs(program):
    answer = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "prove" in answer.stdout


def test_it_builds_itself(program):
    """From inside a zip on sys.path, which is also how an Ansible module finds itself."""
    code = "import sys; sys.path.insert(0, %r); from %s import bundle; sys.stdout.buffer.write(bundle.build())" % (
        str(program),
        bundle.PACKAGE,
    )
    answer = subprocess.run([sys.executable, "-ISc", code], capture_output=True)
    assert answer.stdout == bundle.build(), answer.stderr.decode()


def imported(path: Path) -> set[str]:
    """Files of the package that a file imports, read as ansible-core reads them when it packs a module's payload."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(bundle.PACKAGE):
            base = node.module[len(bundle.PACKAGE) :].strip(".").replace(".", "/")
            names = [base, *("/".join(filter(None, (base, alias.name))) for alias in node.names)]
            found |= {name + ".py" for name in names if (FOLDER / (name + ".py")).is_file()}
    return found


def test_the_payload_of_a_module_holds_all_of_it():
    """ansible-core packs what the imports lead to: from the module, all of the package must be reachable that way."""
    seen: set[str] = set()
    todo = imported(FOLDER.parents[1] / "modules" / "launch_proof.py")
    while todo:
        seen |= todo
        todo = set().union(*(imported(FOLDER / name) for name in todo)) - seen
    assert seen == {name[len(IN_ZIP) :] for name in bundle.sources() if name.startswith(IN_ZIP)} - {
        "__init__.py",
        "sources/__init__.py",
    }


def test_begin_run_imports_little(program):
    """It is on the path of every start of every job."""
    code = (
        "import sys; before = set(sys.modules); sys.path.insert(0, %r); import %s.ledger; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
        % (str(program), bundle.PACKAGE)
    )
    answer = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=True)
    heavy = {
        "subprocess",
        "asyncio",
        "dataclasses",
        "inspect",
        "argparse",
        "logging",
        "http",
        "ssl",
        "ctypes",
        "tempfile",
    }
    assert not heavy & set(answer.stdout.split()), answer.stdout


def test_many_calls_at_once_unpack_one_copy_and_remove_only_old_versions(tmp_path):
    for number in range(6):
        (tmp_path / f"old{number}").mkdir()
    with ThreadPoolExecutor(16) as pool:
        targets = set(pool.map(lambda _number: bundle.unpack(str(tmp_path)), range(16)))
    (target,) = targets
    assert (Path(target) / "__main__.py").exists()
    names = {path.name for path in tmp_path.iterdir()}
    assert Path(target).name in names
    assert len(names) == bundle.KEEP
