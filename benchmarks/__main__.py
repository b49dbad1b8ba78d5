# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""./bench: runs the groups, prints their table, writes artifacts/bench.json and, if asked, docs/benchmarks.md."""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

from benchmarks.rows import Unmeasured, page, status, table
from tests.support.container import REPO, missing

#: In the order in which they run; those of ASKED_FOR only when they are named.
GROUPS = ("death", "log", "units", "connection", "api", "unchanged", "fleet", "workload")
ASKED_FOR = ("deploy",)


def machine() -> str:
    """What the numbers were measured on."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        gib = int(next(lines).split()[1]) / 1024**2
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    commit = subprocess.run(
        ["git", "-C", REPO, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return (
        f"{os.cpu_count()} cores ({model or platform.machine()}), {gib:.0f} GiB of memory, Linux {platform.release()}, "
        f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}; load average {os.getloadavg()[0]:.1f} at the start"
    )


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="./bench")
    parser.add_argument(
        "groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS + ASKED_FOR)}; default: {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--deploy", action="store_true", help="measure group deploy too: a deployment from nothing, some minutes"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    unknown = sorted(set(options.groups) - {*GROUPS, *ASKED_FOR})
    if unknown:
        parser.error(f"{unknown[0]} is no group; give some of {', '.join(GROUPS + ASKED_FOR)}")
    if lacking := missing():
        parser.error(f"this makes LXC containers and needs: {', '.join(lacking)}")
    names = options.groups or [*GROUPS, *(ASKED_FOR if options.deploy else ())]

    # Connections of its own: one that is open already, to this node or to another of its address, would be measured too.
    sockets = tempfile.TemporaryDirectory(prefix="bench-")
    os.environ["ANSIBLE_SSH_CONTROL_PATH_DIR"] = sockets.name
    where, begun, groups, failures = machine(), time.monotonic(), [], []
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"== {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            rows = module.measure()
        except (Unmeasured, RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
            print(f"   {failures[-1]}", file=sys.stderr)
            continue
        groups.append((name, inspect.getdoc(module), rows))
        print(f"   {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    rows = [row for _name, _method, found in groups for row in found]
    sockets.cleanup()
    folder = REPO / "artifacts"
    folder.mkdir(exist_ok=True)
    (folder / "bench.json").write_text(json.dumps([row.data() for row in rows], indent=2, ensure_ascii=False) + "\n")
    print(table(rows))
    print(f"\n{time.monotonic() - begun:.0f} s in all, on {where}")
    for failure in failures:
        print(f"could not be measured: {failure}")
    if options.docs and not failures:
        (REPO / "docs/benchmarks.md").write_text(page(groups, where))
    return status(rows, failures)


if __name__ == "__main__":
    sys.exit(main())
