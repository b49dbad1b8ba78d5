# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Builds C(launchproof), the one file that carries this package to a target.

The sources are taken from wherever this module itself was imported from: a checkout, an installed collection, the
payload of an Ansible module (a zip on sys.path, which holds what was imported and no more), or the zipapp itself. The
bytes depend on the sources alone, so the same sources give the same file and a second delivery changes nothing.
"""

from __future__ import annotations

import io
import sys
import zipfile

# All of the package, so that importing this module is enough to have all of it in an Ansible module's payload.
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import (
    cli,
    decide,
    facts,
    launcher,
    ledger,
    redact,
    render,
    scan,
    session,
    setup_codes,
    spec,
    table,
    view,
    watch,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import (
    cgroup,
    events,
    gpu,
    logfile,
    objects,
    process,
    systemd,
)

MODULES = (
    cli, decide, facts, launcher, ledger, redact, render, scan, session, setup_codes, spec, table, view, watch,
    cgroup, events, gpu, logfile, objects, process, systemd,
    sys.modules[__name__],
)  # fmt: skip
PACKAGE = __name__.rpartition(".")[0]
# Isolated: neither PYTHON* variables of the job nor user packages may change what systemd runs as root.
INTERPRETER = "/usr/bin/python3 -IS"
MAIN = f"""\
import sys

if sys.argv[1:2] in (["begin-run"], ["end-run"]):
    from {PACKAGE}.ledger import main
else:
    from {PACKAGE}.cli import main
sys.exit(main(sys.argv[1:]))
"""
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


def sources() -> dict:
    """Return {path in the zip: bytes} of the whole package."""
    found = {"__main__.py": MAIN.encode()}
    for module in MODULES:
        parts = module.__name__.split(".")
        for depth in range(1, len(parts)):
            found["/".join(parts[:depth]) + "/__init__.py"] = b""
        found["/".join(parts) + ".py"] = module.__spec__.loader.get_data(module.__spec__.origin)
    return found


def build(interpreter: str = INTERPRETER) -> bytes:
    """Return the bytes of the zipapp. I(interpreter) is its first line: a path and at most one argument."""
    buffer = io.BytesIO()
    buffer.write(b"#!" + interpreter.encode() + b"\n")
    # Stored, not deflated: systemd starts it at every run of every job, it is sent once.
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for path, data in sorted(sources().items()):
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            archive.writestr(entry, data)
    return buffer.getvalue()
