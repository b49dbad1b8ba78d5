# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: launch_report
type: aggregate
short_description: Writes the launch report, one row for every declared job, whatever happened
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Collects what M(dflash.launchproof.launch_proof) found on each host, writes it as JSON when the run ends, and prints
    it as a table.
  - It is a callback plugin because a play that writes a report never runs when every host of an earlier play failed.
    Jobs whose host never came to the launch get a row as well, which names the stage and the failing task's message.
  - A play takes part by its play variables. C(launchproof_stage) names the play's stage. C(launchproof_units) is the
    list of units that the play is meant to prove on each host; a run without such a play writes no report.
    C(launchproof_gangs) says which of them belong to a gang, and the report then has a verdict for each gang as a whole.
  - Loads P(dflash.launchproof.pct#connection) and P(ansible.builtin.ssh#connection) before the first task, since each
    task of each host would load them again.
options:
  path:
    description: Where the report is written; a relative path starts at the current folder.
    type: path
    default: artifacts/launch_report.json
    env:
      - name: LAUNCHPROOF_REPORT
    ini:
      - section: callback_launch_report
        key: path
requirements:
  - enabled in configuration, C(callbacks_enabled = dflash.launchproof.launch_report)
"""

EXAMPLES = r"""
ansible.cfg: |
  [defaults]
  callbacks_enabled = dflash.launchproof.launch_report
"""

import gc
import json
import os
import tempfile
from pathlib import Path

from ansible import constants as C
from ansible import context
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import connection_loader, filter_loader, shell_loader
from ansible.template import Templar
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.redact import Redactor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.render import table
from ansible_collections.dflash.launchproof.plugins.module_utils.report import Failure, Report

PROVING_ACTIONS = ("dflash.launchproof.launch_proof", "launch_proof")


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "dflash.launchproof.launch_report"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self):
        super().__init__()
        self._report = Report(check=bool(context.CLIARGS.get("check")))
        self._stage = "preflight"
        self._redact = Redactor([]).text

    # -- what is declared, known before the first task -----------------------------------------------------------------

    def v2_playbook_on_start(self, playbook):
        load_before_forks()
        for play in playbook.get_plays():
            self._declare(play)

    def _declare(self, play):
        """Reads launchproof_units as the play's hosts will see it; a play that --tags leaves out is not meant to prove."""
        manager, loader = play.get_variable_manager(), play.get_loader()
        if "launchproof_units" not in play.get_vars() or not selected(play):
            return
        pattern = Templar(loader, variables=manager.get_vars(play=play)).template(play.hosts)
        for host in manager._inventory.get_hosts(pattern):
            # role_path: role defaults may use it, and outside of a role's own tasks it does not exist.
            variables = {"role_path": "/", **manager.get_vars(play=play, host=host)}
            try:
                templar = Templar(loader, variables=variables)
                units = templar.template(variables["launchproof_units"])
                gangs = templar.template(variables.get("launchproof_gangs", {}))
            except Exception as error:  # whatever is wrong with a declaration, the run's own tasks will say it better
                self._display.warning(f"launch_report cannot read launchproof_units of {host.name}: {error}")
                continue
            for unit in units:
                self._report.declare(host.name, unit, gangs.get(unit))

    # -- what happens --------------------------------------------------------------------------------------------------

    def v2_playbook_on_play_start(self, play):
        # Else each task of each host looks through all of it for garbage, and so copies the memory that it shares.
        gc.freeze()
        self._stage = play.get_vars().get("launchproof_stage", self._stage)

    def v2_runner_on_ok(self, result):
        self._collect(result)

    def v2_runner_on_failed(self, result, ignore_errors=False):
        if not self._collect(result) and not ignore_errors:
            self._fail(result)

    def v2_runner_on_unreachable(self, result):
        self._fail(result, unreachable=True)

    def _collect(self, result) -> bool:
        """Takes the rows of a proof. False where this result has none."""
        rows = result._result.get("jobs")
        if result._task.action not in PROVING_ACTIONS or not isinstance(rows, list):
            return False
        self._report.prove(result._host.name, rows)
        return bool(rows)

    def _fail(self, result, unreachable=False):
        data = result._result
        items = [str(item.get("msg")) for item in data.get("results") or [] if item.get("failed")]
        message = self._redact(" ".join(items) or str(data.get("msg") or data.get("censored") or "no message"))
        stage = "launch_proof" if result._task.action in PROVING_ACTIONS else self._stage
        self._report.fail(Failure(result._host.name, stage, result._task.get_name(), message, unreachable))

    # -- the report ----------------------------------------------------------------------------------------------------

    def v2_playbook_on_stats(self, stats):
        if not self._report.declared:
            return
        path = Path(self.get_option("path"))
        report = self._report.as_dict()
        write_atomically(path, json.dumps(report, indent=2, sort_keys=True) + "\n")
        color = {"ok": C.COLOR_OK, "predicted": C.COLOR_CHANGED}.get(report["verdict"], C.COLOR_ERROR)
        self._display.banner(f"LAUNCH REPORT: {report['verdict']} ({path})")
        self._display.display(table(report["jobs"]), color=color)
        for gang in report.get("gangs", []):
            self._display.display("\n" + gang["sentence"], color=C.COLOR_OK if gang["ok"] else C.COLOR_ERROR)


def load_before_forks() -> None:
    """Load what each task of each host would load again: a task runs in a fork of this process, which inherits it.

    Ansible compiles a collection's plugin and parses its documentation at every load, 30 ms and more for a connection.
    """
    for loader, name in (
        (connection_loader, "ansible.builtin.ssh"),
        (connection_loader, "dflash.launchproof.pct"),
        (shell_loader, "sh"),
        (filter_loader, "dflash.launchproof.job_errors"),  # with all of the collection's
    ):
        loader.get(name, class_only=True)


def selected(play) -> bool:
    """Whether --tags and --skip-tags leave a play in, by its own tags. A play's evaluate_tags() is for its tasks alone."""
    tags = set(play.tags) or {"untagged"}
    return bool(tags & {*play.only_tags, "always"} or "all" in play.only_tags) and not tags & set(play.skip_tags)


def write_atomically(path: Path, text: str) -> None:
    """Replaces path by text; a reader sees the old report or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)
    os.replace(name, path)
