#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet over several ansible-runner workers on this machine, and one report of all: .venv/bin/python examples/fleet/split.py -h

Each worker deploys a part of the hosts. A gang has to lie in one part: leave its hosts out here (--limit), and deploy them by ./deploy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import ansible_runner
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

REPO = Path(__file__).resolve().parents[2]


def hosts_of(inventory: Path, limit: str) -> list[str]:
    """The names of the hosts of group launchproof that the limit leaves, in the inventory's order."""
    manager = InventoryManager(DataLoader(), sources=[str(inventory)])
    manager.subset(limit)
    names = [host.name for host in manager.get_hosts("launchproof")]
    if not names:
        raise SystemExit(f"{inventory} has no host of group launchproof (limit: {limit or 'none'}).")
    return names


def positive(text: str) -> int:
    """An argparse type."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return int(text)


def merged(parts: list[dict]) -> dict:
    """One report of several; the worst verdict counts."""
    jobs = [job for part in parts for job in part["jobs"]]
    gangs = [gang for part in parts for gang in part.get("gangs", [])]
    verdicts = {part["verdict"] for part in parts}
    verdict = next((verdict for verdict in ("failed", "predicted") if verdict in verdicts), "ok")
    return {"schema": 1, "verdict": verdict, "jobs": jobs, **({"gangs": gangs} if gangs else {})}


def main() -> int:
    """Run the workers side by side; 0 when all of them, and every launch, went well."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-i", "--inventory", type=Path, required=True)
    p.add_argument("--playbook", default="deploy.yml", help="of this checkout (default: %(default)s)")
    p.add_argument("--limit", default="all", help="host pattern, as ansible's (default: %(default)s)")
    p.add_argument(
        "--workers", type=positive, default=4, help="parts, each by an ansible-runner (default: %(default)s)"
    )
    p.add_argument(
        "--forks", type=positive, default=20, help="hosts that each of them works on at once (default: %(default)s)"
    )
    p.add_argument("--report", type=Path, default=REPO / "artifacts/launch_report.json")
    args = p.parse_args()
    # The ansible-playbook beside this Python, whatever PATH has.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    hosts = hosts_of(args.inventory, args.limit)
    # In slices: hosts that stand beside one another are often on one node, and share its connections.
    size = -(-len(hosts) // args.workers)
    slices = [hosts[i : i + size] for i in range(0, len(hosts), size)]
    with tempfile.TemporaryDirectory(prefix="launchproof-fleet-") as name:
        started = []
        for number, part in enumerate(slices):
            folder = Path(name, str(number))
            folder.mkdir()
            started.append(
                ansible_runner.run_async(
                    private_data_dir=str(folder),
                    project_dir=str(REPO),
                    inventory=str(args.inventory.resolve()),
                    playbook=args.playbook,
                    limit=",".join([*part, "localhost"]),
                    forks=args.forks,
                    envvars={"LAUNCHPROOF_REPORT": str(folder / "report.json")},
                    quiet=True,
                )
            )
        reports = []
        for number, (thread, run) in enumerate(started):
            thread.join()
            path = Path(name, str(number), "report.json")
            if path.exists():
                reports.append(json.loads(path.read_text()))
            elif run.rc:
                print(f"No report of {', '.join(slices[number])}: {run.stdout.read()[-3000:]}", file=sys.stderr)
                reports.append({"verdict": "failed", "jobs": []})
    report = merged(reports)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    for job in report["jobs"]:
        print(f"{job['host']:20} {job['unit']:28} {job['code']:18} {job['remedy']}")
    return 0 if report["verdict"] == "ok" and all(run.rc == 0 for _thread, run in started) else 1


if __name__ == "__main__":
    sys.exit(main())
