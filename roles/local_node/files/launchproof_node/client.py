# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's own way to its API: root@pam by the password that only root can read, as pct and pvesh have it."""

import http.client
import json
import ssl
import time
from urllib.parse import urlencode

PREFIX = "/api2/json"


class ApiError(Exception):
    """The API refused: status, reason and the errors by field."""

    def __init__(self, status, reason, errors):
        super().__init__(reason)
        self.status, self.reason, self.errors = status, reason, errors

    def lines(self):
        """What the command line tools print: a code only where Proxmox VE's own exceptions carry one."""
        first = self.reason if self.status == 500 else f"{self.status} {self.reason}"
        return [first, *(f"{name}: {why}".rstrip() for name, why in sorted(self.errors.items()))]


class Client:
    """A logged-in session."""

    def __init__(self, settings):
        """Log in; raises OSError when the API does not answer, ApiError when it refuses."""
        context = ssl.create_default_context(cafile=str(settings.ca))
        self._connection = http.client.HTTPSConnection(
            settings.api_host, settings.api_port, context=context, timeout=120
        )
        self._headers = {}
        login = {"username": "root@pam", "password": settings.secret(settings.password_file)}
        ticket = self.request("POST", "/access/ticket", login)
        self._headers = {
            "Cookie": f"PVEAuthCookie={ticket['ticket']}",
            "CSRFPreventionToken": ticket["CSRFPreventionToken"],
        }

    def request(self, method, path, values=None):
        """The data of an answer; raises ApiError."""
        body, headers = None, dict(self._headers)
        if values and method in ("POST", "PUT"):
            body, headers["Content-Type"] = urlencode(values), "application/x-www-form-urlencoded"
        elif values:
            path = f"{path}?{urlencode(values)}"
        self._connection.request(method, PREFIX + path, body, headers)
        answer = self._connection.getresponse()
        data = json.loads(answer.read() or b"{}")
        if answer.status >= 400:
            raise ApiError(answer.status, answer.reason, data.get("errors") or {})
        return data.get("data")

    def wait(self, upid):
        """Wait for a task; (exit status, log lines)."""
        path = f"/nodes/{upid.split(':')[1]}/tasks/{upid}"
        while True:
            status = self.request("GET", path + "/status")
            if status["status"] == "stopped":
                return status["exitstatus"], [line["t"] for line in self.request("GET", path + "/log")]
            time.sleep(0.05)  # the API offers nothing to wait on
