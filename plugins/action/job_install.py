# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of job_install: validate, keep the secrets apart, send code that the target lacks."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from ansible import constants as C
from ansible.plugins.action import ActionBase
from ansible_collections.dflash.launchproof.plugins.module_utils.job import code as code_tree
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec

MODULE = "dflash.launchproof.job_install"


class ActionModule(ActionBase):
    """One module call when the target has the code already, two and one transfer a folder when it does not."""

    _VALID_ARGS = frozenset(("jobs", "gpus", "manager", "look_first"))

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        declared, gpus = self._task.args.get("jobs"), self._task.args.get("gpus") or []
        jobs, errors = spec.validate(declared, gpus, controller=True)
        if errors:
            return {
                **result,
                "failed": True,
                "changed": False,
                "msg": "\n- ".join(["Nothing was changed:", *errors]),
                "errors": errors,
            }
        try:
            trees = {job.code: code_tree.scan(job.code.src, job.code.exclude) for job in jobs if job.code}
            hashes = {code: code_tree.tree_hash(code.src, entries) for code, entries in trees.items()}
            delivered = {job.name: {"code": hashes.get(job.code), "lock": _file_hash(job.lock)} for job in jobs}
        except (code_tree.CodeError, OSError) as error:
            return {
                **result,
                "failed": True,
                "changed": False,
                "msg": f"Nothing was changed. The code cannot be read: {error}",
            }
        args = {
            "jobs": [_without_secrets(job) for job in spec.plain(declared, "jobs", [])],
            "gpus": list(gpus),
            "manager": self._task.args.get("manager") or "auto",
            "look_first": self._task.args.get("look_first") or False,
            "secrets": {unit.name: dict(unit.secrets) for job in jobs for unit in job.units if unit.secrets},
            "delivered": delivered,
        }
        answer = self._execute_module(MODULE, module_args=args, task_vars=task_vars)
        missing = answer.pop("needs_code", [])
        if missing:
            for dest in missing:
                code = next(code for code in trees if code.dest == dest)
                archive = self._send(code, trees[code])
                for job in jobs:
                    if job.code == code:
                        delivered[job.name]["archive"] = archive
            answer = self._execute_module(MODULE, module_args=args, task_vars=task_vars)
        return {**result, **answer}

    def _send(self, code, entries):
        """Send a folder as one file; return its path on the target, which the base class cleans up."""
        if not self._connection._shell.tmpdir:
            self._make_tmp_path()
        remote = self._connection._shell.join_path(
            self._connection._shell.tmpdir, os.path.basename(code.dest) + ".tar.gz"
        )
        with tempfile.NamedTemporaryFile(prefix="code-", dir=C.DEFAULT_LOCAL_TMP) as local:
            code_tree.write_archive(code.src, entries, local)
            local.flush()
            self._transfer_file(local.name, remote)
        self._fixup_perms2((self._connection._shell.tmpdir, remote), execute=False)
        return remote


def _without_secrets(job):
    """The job as the target's log of module calls may show it."""
    public = {key: value for key, value in job.items() if key != "secrets"}
    if public.get("instances"):
        public["instances"] = [
            {key: value for key, value in instance.items() if key != "secrets"} for instance in public["instances"]
        ]
    return public


def _file_hash(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
