# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Builds C(launchproof), the one file that carries this package to a target.

The sources are taken from wherever this module itself was imported from: a checkout, an installed collection, the
payload of an Ansible module (a zip on sys.path, which holds what was imported and no more), or the zipapp itself. The
bytes depend on the sources alone, so the same sources give the same file and a second delivery changes nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import pkgutil
import re
import shutil
import tempfile
import zipfile
import zipimport

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger

PACKAGE = __name__.rpartition(".")[0]
# Isolated: neither PYTHON* variables of the job nor user packages may change what systemd runs as root.
INTERPRETER = "/usr/bin/python3 -IS"
# Python keeps no compiled code of what it imports from a zip, so whoever can uses the unpacked copy: 0.1 s less CPU a start.
MAIN = """\
import os
import sys

unpacked = "{folder}/{digest}"
try:
    if os.stat(unpacked).st_uid == 0:
        sys.path.insert(0, unpacked)
except OSError:
    pass
if sys.argv[1:2] in (["begin-run"], ["end-run"]):
    from {package}.ledger import main
elif sys.argv[1:2] == ["run-job"]:
    from {package}.runner import main
else:
    from {package}.cli import main
sys.exit(main(sys.argv[1:]))
"""
UNPACKED = ledger.Paths().state + "/lib"
KEEP = 4  # unpacked versions: a prover that still runs may be of an older one
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


def _modules():
    """Yield (name, source) of each module of the package, without importing it."""
    for package in (PACKAGE, PACKAGE + ".sources"):
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
            finder = found.module_finder
            if found.ispkg:
                continue
            if isinstance(finder, zipimport.zipimporter):
                # Its find_spec() compiles the module, 1 ms each, to tell no more than this.
                source = finder.get_data(f"{finder.archive}/{finder.prefix}{found.name}.py")
            else:
                module = importlib.util.find_spec(f"{package}.{found.name}")
                source = module.loader.get_data(module.origin)
            yield f"{package}.{found.name}", source


def sources() -> dict:
    """Return {path in the zip: bytes} of the whole package."""
    found = {}
    for name, source in _modules():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            found["/".join(parts[:depth]) + "/__init__.py"] = b""
        found["/".join(parts) + ".py"] = source
    version = hashlib.sha256()
    for path, data in sorted(found.items()):
        version.update(b"%s %d\n" % (path.encode(), len(data)) + data)
    found["__main__.py"] = MAIN.format(folder=UNPACKED, digest=version.hexdigest()[:16], package=PACKAGE).encode()
    return found


def _payload() -> None:
    """Never called: Ansible packs into a module's payload what its sources import, wherever in them. To import all of it costs 0.1 s."""
    from ansible_collections.dflash.launchproof.plugins.module_utils.proof import (  # noqa: F401
        adhoc,
        cli,
        collect,
        decide,
        envfile,
        facts,
        gpus,
        launcher,
        prover,
        redact,
        render,
        runner,
        scan,
        session,
        setup_codes,
        shell,
        spec,
        table,
        view,
        watch,
    )
    from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import (  # noqa: F401
        cgroup,
        dbus,
        events,
        gpu,
        logfile,
        manager,
        nvml,
        objects,
        process,
        supervisor,
        systemd,
        xmlrpc_unix,
    )


def build(interpreter: str = INTERPRETER) -> bytes:
    """Return the bytes of the zipapp. I(interpreter) is its first line: a path and at most one argument."""
    buffer = io.BytesIO()
    buffer.write(b"#!" + interpreter.encode() + b"\n")
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for path, data in sorted(sources().items()):
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            archive.writestr(entry, data)
    return buffer.getvalue()


def unpack(folder: str = UNPACKED) -> str:
    """Unpack the package into a folder of its own below I(folder), once, and return that: it outlives the caller."""
    files = sources()
    version = re.search(r'unpacked = ".*/(\w+)"', files["__main__.py"].decode()).group(1)
    target = os.path.join(folder, version)
    if os.path.isdir(target):
        return target
    os.makedirs(folder, mode=0o755, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix=".new-", dir=folder)
    try:
        for path, data in files.items():
            os.makedirs(os.path.dirname(os.path.join(temporary, path)), exist_ok=True)
            with open(os.path.join(temporary, path), "wb") as handle:
                handle.write(data)
        os.chmod(temporary, 0o755)
        os.rename(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not os.path.isdir(target):  # else another call was first
            raise
    # Never the one in use, and never what another call is just unpacking.
    others = [
        os.path.join(folder, name) for name in os.listdir(folder) if name != version and not name.startswith(".new-")
    ]
    for path in sorted(others, key=_changed_at)[: -(KEEP - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def _changed_at(path: str) -> float:
    """Time of the last change, s since the epoch; 0 for what another call has just removed."""
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0.0
