# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Proxmox API over proxmoxer: verified, bounded, its errors told apart.

Two ways lead to the same methods: HTTPS with a token or a ticket, and ``pvesh`` as root on the node, which alone may
set root-only keys when the API identity is not root@pam by password. What proxmoxer 2.3.0 does by default and this
module does not: skip certificate verification, wait five seconds only, end the process when requests is missing, and
hand a page that is not JSON back as success.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import traceback
from pathlib import Path
from urllib.parse import quote

try:
    # In this order: without requests proxmoxer's https backend calls sys.exit.
    import requests
    from proxmoxer import AuthenticationError, ProxmoxAPI, ResourceException
    from proxmoxer.backends.command_base import CommandBaseSession, JsonSimpleSerializer
    from proxmoxer.core import ProxmoxResource

    IMPORT_ERROR = None
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
    CommandBaseSession = object

#: Seconds between two looks at a task: the API has no event for its end.
_TASK_INTERVALS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
#: Attempts of a read that met a broken connection or an overloaded node.
_READ_ATTEMPTS = 3
#: Lines of a failed task's log that go into the message.
_LOG_TAIL = 15

# What a 500 means is in its words alone (pve-behaviours; PVE::LXC::Config, PVE::Cluster, PVE::INotify).
_KINDS = (
    ("absent", r"Configuration file '.*' does not exist"),
    ("locked", r"(CT|VM) is locked|can't lock file|got lock request timeout"),
    ("no_quorum", r"no quorum|cluster not ready"),
    ("node_unreachable", r"hostname lookup '.*' failed|No route to host|proxy handshake"),
    ("conflict", r"detected modified configuration"),
    ("exists", r"already exists"),
    ("already", r"already running|not running|is already at specified size"),
    ("storage_full", r"No space left|out of space|not enough (free )?space"),
)


class ApiError(Exception):
    """A call that failed.

    ``kind`` is one word: unreachable, dropped, tls, no_ca, no_credentials, timeout, not_proxmox, unauthorized,
    forbidden, bad_request, absent, locked, no_quorum, node_unreachable, conflict, exists, already, storage_full,
    task_failed, task_timeout, refused.
    ``status`` is the HTTP status, or None where none came back.
    """

    def __init__(self, kind: str, message: str, status: int | None = None):
        super().__init__(message)
        self.kind, self.status = kind, status


def classify(status: int, text: str) -> str:
    """The kind of an HTTP error from its status and its reason phrase, which is where Proxmox puts the message."""
    if status == 401:
        return "unauthorized"
    if status == 403:
        return "forbidden"
    if status == 400:
        return "bad_request"
    if status in (595, 596):
        return "node_unreachable"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "refused")


class Api:
    """Calls by path, ``api.get("nodes/pve1/lxc/901/config")``.

    :param resource: a proxmoxer resource at the root of the API.
    :param where: how messages name it.
    :param lock_timeout: seconds a change is retried while the container is locked.
    :param task_timeout: seconds a task may run.
    """

    def __init__(
        self,
        resource,
        where: str,
        lock_timeout: float = 60,
        task_timeout: float = 600,
        sleep=time.sleep,
        clock=time.monotonic,
    ):
        self._resource, self.where = resource, where
        self._lock_timeout, self._task_timeout = lock_timeout, task_timeout
        self._sleep, self._clock = sleep, clock
        self.calls: list[str] = []
        self.warnings: list[str] = []

    def get(self, path: str, **params):
        """The data of a read. A read is repeated when the connection broke: it changes nothing."""
        for attempt in range(1, _READ_ATTEMPTS + 1):
            try:
                return self._call("GET", path, params)
            except ApiError as error:
                if error.kind not in ("timeout", "dropped", "node_unreachable") or attempt == _READ_ATTEMPTS:
                    raise
                self._sleep(0.5 * attempt)
        raise AssertionError("unreachable")

    def change(self, method: str, path: str, **params):
        """The data of a POST, PUT or DELETE.

        It is repeated only where Proxmox said that it had done nothing, because of a lock. After a timeout nobody
        knows, and the caller has to read what is there.
        """
        deadline = self._clock() + self._lock_timeout
        pause = 0.5
        while True:
            try:
                return self._call(method, path, params)
            except ApiError as error:
                if error.kind != "locked" or self._clock() + pause > deadline:
                    raise
            self._sleep(pause)
            pause = min(pause * 2, 5)

    def _call(self, method: str, path: str, params: dict):
        self.calls.append(f"{method} {path}")
        wire = {key: int(value) if isinstance(value, bool) else value for key, value in params.items()}
        what = f"{method} {path} at {self.where}"
        try:
            data = getattr(self._resource(path), method.lower())(**wire)
        except ResourceException as error:
            text = _text(error)
            raise ApiError(
                classify(error.status_code, text), f"{what}: {error.status_code} {text}", error.status_code
            ) from error
        except requests.exceptions.SSLError as error:
            raise ApiError("tls", f"{what}: the certificate is not trusted: {_cause(error)}") from error
        except requests.exceptions.ConnectTimeout as error:
            raise ApiError("unreachable", f"{what}: no answer to the connection attempt") from error
        except requests.exceptions.Timeout as error:
            raise ApiError("timeout", f"{what}: no answer in time; whether it took effect is not known") from error
        except requests.exceptions.ConnectionError as error:
            # A refused connection reached nobody; a dropped one may have.
            dropped = "Connection aborted" in str(error) or "RemoteDisconnected" in str(error)
            raise ApiError("dropped" if dropped else "unreachable", f"{what}: {_cause(error)}") from error
        except requests.exceptions.RequestException as error:
            raise ApiError("not_proxmox", f"{what}: {_cause(error)}") from error
        except (KeyError, TypeError) as error:
            raise ApiError("not_proxmox", f"{what}: the answer has no data; this is no Proxmox API") from error
        if isinstance(data, dict) and isinstance(data.get("errors"), bytes):
            raise ApiError("not_proxmox", f"{what}: the answer is not JSON: {data['errors'][:80]!r}")
        return data

    def follow(self, upid: str, what: str) -> None:
        """Wait until task ``upid`` has ended, well: its warnings are kept, its failure raises with the log's tail.

        ``stopped`` alone is no success; only ``OK`` and ``WARNINGS: N`` are.
        """
        node = upid.split(":")[1]
        path = f"nodes/{node}/tasks/{quote(upid, safe='')}"
        deadline = self._clock() + self._task_timeout
        intervals = iter(_TASK_INTERVALS)
        while True:
            try:
                status = self.get(f"{path}/status")
            except ApiError as error:
                # The task runs on whatever happens to this connection: keep looking until the deadline.
                if error.kind not in ("timeout", "dropped", "unreachable", "node_unreachable"):
                    raise
                status = {"status": "unknown"}
            if status.get("status") == "stopped":
                break
            if self._clock() > deadline:
                raise ApiError(
                    "task_timeout",
                    f"{what}: task {upid} has not ended within {self._task_timeout:g} s; it "
                    "goes on, and the next run takes it up",
                )
            self._sleep(next(intervals, _TASK_INTERVALS[-1]))
        result = str(status.get("exitstatus", ""))
        if result == "OK":
            return
        tail = self._log_tail(path)
        if result.startswith("WARNINGS"):
            self.warnings += [line for line in tail if "WARN" in line.upper()] or [f"{what}: {result}"]
            return
        raise ApiError(
            "already" if classify(500, result) == "already" else "task_failed",
            f"{what} failed: {result or 'it ended without a result'}" + ("\n" + "\n".join(tail) if tail else ""),
        )

    def _log_tail(self, path: str) -> list[str]:
        try:
            lines = self.get(f"{path}/log", limit=0)
        except ApiError:
            return []
        return [line.get("t", "") for line in sorted(lines, key=lambda line: line.get("n", 0))][-_LOG_TAIL:]


def _text(error) -> str:
    """The words of a ResourceException: Proxmox's message, then what it says of each field."""
    text = str(error.content or error.status_message or "").strip()
    fields = error.errors if isinstance(error.errors, dict) else {}
    details = "; ".join(f"{name}: {str(why).strip()}" for name, why in fields.items() if isinstance(why, str))
    return f"{text} {details}".strip()


def _cause(error) -> str:
    """The innermost reason of a requests exception, which wraps urllib3's, which wraps the system's."""
    seen = error
    while True:
        inner = getattr(seen, "reason", None) or (seen.args[0] if getattr(seen, "args", None) else None)
        if not isinstance(inner, Exception) or inner is seen:
            break
        seen = inner
    return str(seen)


def connect(options: dict) -> Api:
    """The API over HTTPS, from the options of doc fragment ``pve``.

    A ticket login happens here; with a token nothing is sent yet. Raises ApiError.
    """
    host, port = options["api_host"], options["api_port"]
    where = f"https://{host}:{port}"
    verify = True
    if options.get("api_ca_path"):
        verify = str(Path(options["api_ca_path"]).expanduser())
        if not Path(verify).is_file():
            raise ApiError("no_ca", f"api_ca_path is {verify!r}: there is no such file")
    if options.get("api_password"):
        credentials = {"password": options["api_password"]}
    elif options.get("api_token_id") and options.get("api_token_secret"):
        credentials = {
            "token_name": options["api_token_id"].rpartition("!")[2],
            "token_value": options["api_token_secret"],
        }
    else:
        raise ApiError("no_credentials", f"{where}: neither a token with its secret nor a password is given")
    # A proxy for the internet is not one for this machine.
    proxies = {"http": "", "https": ""} if host in ("localhost", "::1") or host.startswith("127.") else None
    try:
        client = ProxmoxAPI(
            host,
            port=port,
            user=options["api_user"],
            verify_ssl=verify,
            proxies=proxies,
            timeout=options["api_timeout"],
            backend="https",
            **credentials,
        )
    except AuthenticationError as error:
        raise ApiError("unauthorized", f"login of {options['api_user']} at {where} was refused", 401) from error
    except requests.exceptions.SSLError as error:
        raise ApiError("tls", f"{where}: the certificate is not trusted: {_cause(error)}") from error
    except requests.exceptions.RequestException as error:
        raise ApiError("unreachable", f"{where}: {_cause(error)}") from error
    return Api(client, where, options["lock_timeout"], options["task_timeout"])


def identity(options: dict) -> str:
    """Who the API sees: ``root@pam`` or ``root@pam!token``."""
    if options.get("api_password"):
        return options["api_user"]
    return f"{options['api_user']}!{(options.get('api_token_id') or '').rpartition('!')[2]}"


class PveshSession(CommandBaseSession):
    """proxmoxer's command session with a prefix: run here, or behind ``ssh`` with its host key verified."""

    def __init__(self, prefix: list[str], timeout: float):
        super().__init__(service="PVE", timeout=timeout)
        self._prefix = prefix

    def _exec(self, cmd):
        # One shell word for ssh, which joins its arguments with spaces; pvesh corrupts text without a UTF-8 locale.
        full = [*self._prefix, f"LC_ALL=C.UTF-8 {shlex.join(cmd)}"] if self._prefix else cmd
        try:
            done = subprocess.run(
                full,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout,
                env={**os.environ, "LC_ALL": "C.UTF-8"},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ApiError(
                "timeout",
                f"{full[0]} … pvesh gave no answer within {self.timeout} s; whether it took effect is not known",
            ) from error
        except OSError as error:
            raise ApiError("unreachable", f"{full[0]} cannot be run here: {error.strerror}") from error
        stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if self._prefix and done.returncode == 255 and re.search(r"^(ssh:|.*Permission denied|Host key)", stderr, re.M):
            raise ApiError("unreachable", f"ssh to the node failed: {stderr.strip()}")
        # proxmoxer takes any stderr for a failure and an empty one for success: the exit code decides.
        return (
            stdout,
            ("" if done.returncode == 0 else stderr or f"pvesh ended with {done.returncode}"),
            done.returncode,
        )


def connect_root(options: dict) -> Api | None:
    """The API as root@pam through ``pvesh`` on the node, or None where ``root_via`` is ``none``."""
    via = options["root_via"]
    if via == "none":
        return None
    prefix: list[str] = []
    where = "pvesh on this machine"
    if via == "ssh":
        node = options.get("root_ssh") or {}
        prefix = ssh_prefix(node, options["api_host"])
        where = f"pvesh on {node.get('host') or options['api_host']}"
    session = PveshSession(prefix, options["api_timeout"])
    resource = ProxmoxResource(base_url="", session=session, serializer=JsonSimpleSerializer())
    return Api(resource, where, options["lock_timeout"], options["task_timeout"])


def ssh_prefix(node: dict, default_host: str) -> list[str]:
    """The ssh command line up to the remote command, for the options of ``root_ssh``."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"]
    if node.get("port"):
        command += ["-p", str(node["port"])]
    if node.get("key_file"):
        command += ["-i", str(Path(node["key_file"]).expanduser()), "-o", "IdentitiesOnly=yes"]
    if node.get("known_hosts_file"):
        command += ["-o", f"UserKnownHostsFile={Path(node['known_hosts_file']).expanduser()}"]
    return [*command, f"{node.get('user') or 'root'}@{node.get('host') or default_host}", "--"]
