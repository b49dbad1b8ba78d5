# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Controls the module launch_proof: arms the prover, then reads its events in short calls, and shows how it goes.

The session's id is made here, so that arming can be repeated after a lost connection without starting anything twice.
"""

from __future__ import annotations

import time
import uuid

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import session

MODULE = "dflash.launchproof.launch_proof"
ARM_WAIT = 2.0  # s that the first call waits for news: getting there has taken its time already
GRACE = 5.0  # s that the other units get after one has failed, before the task fails
LINE_EVERY = 5.0  # s after which a live line of a host must come again
CALL_TIME = 1.0  # s of a call besides its waiting, where nothing was measured yet
SHORTEST = 0.5  # s that a call waits at least, however long the way is
RECONNECT = (1, 2, 4, 8, 15, 30)  # s before each new attempt after a lost connection

display = Display()


class ActionModule(ActionBase):
    """dflash.launchproof.launch_proof"""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        del tmp
        task_vars = task_vars or {}
        self._host = task_vars.get("inventory_hostname", "localhost")
        arguments = dict(self._task.args, host=self._host)
        if self._task.check_mode:
            result.update(self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars))
            return result
        arguments.update(phase="arm", session=uuid.uuid4().hex, wait=ARM_WAIT)
        news = self._call(arguments, task_vars)
        if news.get("failed"):
            result.update(news)
            return result
        result.update(self._follow(news, task_vars))
        if result["verdict"] == "failed":
            result.update(failed=True, msg=session.summary(result["jobs"]))
        return result

    def _call(self, arguments: dict, task_vars: dict) -> dict:
        """Run the module, again after a lost connection: neither prover nor job depend on it."""
        for pause in RECONNECT + (None,):
            try:
                answer = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
                # A connection that is killed in the middle looks like a module that printed nothing.
                lost = (
                    answer.get("failed")
                    and "module_stdout" in answer
                    and not answer["module_stdout"]
                    and not answer.get("module_stderr")
                )
                if not lost:
                    return answer
                error = AnsibleConnectionFailure("the connection ended before the module's answer")
            except AnsibleConnectionFailure as failure:
                error = failure
            if pause is None:
                break
            display.display("%s: connection lost, the proof goes on there; again in %d s" % (self._host, pause))
            time.sleep(pause)
            try:
                self._connection.reset()
            except (AnsibleConnectionFailure, NotImplementedError):
                continue
        raise error

    def _follow(self, news: dict, task_vars: dict) -> dict:
        """Read events until the verdict, or until some unit has failed and the others had their grace."""
        plan, session_id = news["plan"], news["session"]
        units = [row["unit"] for row in plan["jobs"]]
        rows, failed_at, call_time = {}, None, CALL_TIME
        while True:
            for event in news["events"]:
                if event["event"] == "verdict" and event["unit"] in units:
                    rows[event["unit"]] = event["row"]
            if news["verdict"] is not None:
                rows.update((row["unit"], row) for row in news["verdict"]["jobs"])
            if all(unit in rows for unit in units):
                break
            now = time.monotonic()
            if failed_at is None and any(not row["ok"] for row in rows.values()):
                failed_at = now
            if failed_at is not None and now - failed_at >= GRACE:
                for unit in units:
                    rows.setdefault(unit, session.undecided_row(unit, news["status"], self._host, session_id))
                break
            display.display(session.live_line(self._host, rows, news["status"]))
            # Each call ends with a line, so that what is slow and what is dead look different.
            left = (
                LINE_EVERY - call_time if failed_at is None else min(GRACE - (now - failed_at), LINE_EVERY - call_time)
            )
            wait = max(SHORTEST, left)
            arguments = {
                "phase": "follow",
                "session": session_id,
                "offset": news["offset"],
                "wait": wait,
                "host": self._host,
            }
            news = self._call(arguments, task_vars)
            took = time.monotonic() - now
            call_time = took - wait if took > wait else call_time  # else news came before the wait was over
            if news.get("failed"):
                for unit in units:
                    rows.setdefault(unit, session.undecided_row(unit, {}, self._host, session_id))
                return dict(plan, verdict="failed", session=session_id, jobs=[rows[unit] for unit in units])
        ordered = [rows[unit] for unit in units]
        verdict = "ok" if all(row["ok"] for row in ordered) else "failed"
        return dict(plan, verdict=verdict, jobs=ordered, session=session_id)
