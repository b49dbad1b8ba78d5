# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Proxmox API over proxmoxer: verified, bounded, its errors told apart.

Two ways lead to the same methods: HTTPS with a token or a ticket, and ``pvesh`` as root on the node, which alone may
set root-only keys when the API identity is not root@pam by password. What proxmoxer 2.3.0 does by default and this
module does not: skip certificate verification, send the password over a connection of its own, wait five seconds only,
end the process when requests is missing, and hand a page that is not JSON back as success.
"""

from __future__ import annotations

import os
import random
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
    from proxmoxer import ResourceException
    from proxmoxer.backends.command_base import CommandBaseSession, JsonSimpleSerializer
    from proxmoxer.backends.https import (
        JsonSerializer,
        ProxmoxHTTPApiTokenAuth,
        ProxmoxHTTPAuthBase,
        ProxmoxHttpSession,
    )
    from proxmoxer.core import ProxmoxResource
    from requests.adapters import HTTPAdapter
    from requests.cookies import cookiejar_from_dict

    IMPORT_ERROR = None
except ImportError:
    IMPORT_ERROR = traceback.format_exc()
    CommandBaseSession = ProxmoxHTTPAuthBase = HTTPAdapter = object

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
#: The answer did not come back: a read is asked again, and of a change nobody knows whether it took effect.
_NO_ANSWER = ("timeout", "dropped", "node_unreachable", "overloaded")
#: After a change, what makes a second look at the container worth while: the effect is not known, or somebody else has
#: done something meanwhile, a run whose controller died for instance.
_LOOK_AGAIN = (*_NO_ANSWER, "not_proxmox", "task_lost", "conflict", "exists", "already")
#: What a look at a task may meet while the task runs on.
_POLL_AGAIN = (*_NO_ANSWER, "unreachable", "not_proxmox", "refused")


class ApiError(Exception):
    """A call that failed.

    ``kind`` is one word: unreachable, dropped, tls, no_ca, no_credentials, no_root_way,
    bad_fingerprint, timeout, overloaded, not_proxmox,
    unauthorized, forbidden, bad_request, absent, locked, no_quorum, node_unreachable, conflict, exists, already,
    storage_full, task_failed, task_lost, task_timeout, refused.
    ``status`` is the HTTP status, or None where none came back. ``fields``: what a 400 says of each parameter.
    ``changing``: it was a change, not a read. ``ended``: a task that ran to its end, badly.
    """

    def __init__(self, kind: str, message: str, status: int | None = None, ended: bool = False, fields=None):
        super().__init__(message)
        self.kind, self.status, self.ended = kind, status, ended
        self.fields: dict[str, str] = fields or {}
        self.changing = False

    @property
    def uncertain(self) -> bool:
        """Whether a change that ended like this may have done something all the same."""
        return self.ended or self.kind in (*_NO_ANSWER, "not_proxmox", "task_lost", "task_timeout")

    @property
    def look_again(self) -> bool:
        """Whether the container has to be looked at before anybody can say what this failure means."""
        return self.changing and self.kind in _LOOK_AGAIN


def classify(status: int, text: str) -> str:
    """The kind of an HTTP error from its status and its reason phrase, which is where Proxmox puts the message."""
    by_status = {401: "unauthorized", 403: "forbidden", 400: "bad_request", 595: "node_unreachable"}
    if status in by_status:
        return by_status[status]
    if status in (408, 429, 502, 503, 504, 596, 597, 598, 599):
        return "overloaded"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "refused")


class Api:
    """Calls by path, ``api.get("nodes/pve1/lxc/901/config")``.

    :param resource: a proxmoxer resource at the root of the API.
    :param where: how messages name it.
    :param lock_timeout: seconds a change is retried while the container is locked.
    :param task_timeout: seconds a task may run.
    :param login: where the identity is a password, gets a ticket through the function that it is given: before the first
        call, and again when Proxmox says that it has expired.
    """

    def __init__(
        self,
        resource,
        where: str,
        lock_timeout: float = 60,
        task_timeout: float = 600,
        login=None,
        sleep=time.sleep,
        clock=time.monotonic,
    ):
        self._resource, self.where = resource, where
        self._lock_timeout, self._task_timeout = lock_timeout, task_timeout
        self._login, self._sleep, self._clock = login, sleep, clock
        self._logged_in = login is None
        self.calls: list[str] = []
        self.upids: list[str] = []
        self.warnings: list[str] = []

    def get(self, path: str, **params):
        """The data of a read. A read is repeated when the connection broke: it changes nothing."""
        for attempt in range(1, _READ_ATTEMPTS + 1):
            try:
                return self._call("GET", path, params)
            except ApiError as error:
                if error.kind not in _NO_ANSWER or attempt == _READ_ATTEMPTS:
                    raise
                self._sleep(0.5 * attempt)
        raise AssertionError("unreachable")

    def change(self, method: str, path: str, what: str, **params) -> None:
        """Send a POST, PUT or DELETE, and wait for the task that it begins.

        It is repeated only where Proxmox said that it had done nothing, because of a lock. After a timeout nobody
        knows, and the caller has to read what is there.
        """
        deadline = self._clock() + self._lock_timeout
        pause = 0.5
        while True:
            try:
                upid = self._call(method, path, params)
                if isinstance(upid, str) and upid.startswith("UPID:"):
                    self.follow(upid, what)
                return
            except ApiError as error:
                error.changing = True
                if error.kind != "locked" or self._clock() + pause > deadline:
                    raise
            self._sleep(pause)
            pause = min(pause * 2, 5)

    def _call(self, method: str, path: str, params: dict):
        fresh = not self._logged_in
        if fresh:
            self._renew()
        try:
            return self._send(method, path, params)
        except ApiError as error:
            # A ticket lives for two hours, and less when the node's key is renewed; a 401 has changed nothing.
            if error.kind != "unauthorized" or self._login is None or fresh:
                raise
        self._renew()
        return self._send(method, path, params)

    def _renew(self) -> None:
        self._login(self._send)
        self._logged_in = True

    def _send(self, method: str, path: str, params: dict):
        self.calls.append(f"{method} {path}")
        wire = {key: int(value) if isinstance(value, bool) else value for key, value in params.items()}
        what = f"{method} {path} at {self.where}"
        try:
            data = getattr(self._resource(path), method.lower())(**wire)
        except ResourceException as error:
            fields = _fields(error)
            details = "; ".join(f"{name}: {why}" for name, why in fields.items())
            text = f"{str(error.content or error.status_message or '').strip()} {details}".strip()
            raise ApiError(
                classify(error.status_code, text),
                f"{what}: {error.status_code} {text}",
                error.status_code,
                fields=fields,
            ) from error
        except requests.exceptions.SSLError as error:
            raise _tls(what, _cause(error)) from error
        except requests.exceptions.ConnectTimeout as error:
            raise ApiError("unreachable", f"{what}: no answer to the connection attempt") from error
        except requests.exceptions.Timeout as error:
            raise ApiError("timeout", f"{what}: no answer in time; whether it took effect is not known") from error
        except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            # A refused connection reached nobody; a dropped one may have.
            dropped = re.search("Connection (aborted|broken|reset)|RemoteDisconnected|IncompleteRead", str(error))
            raise ApiError("dropped" if dropped else "unreachable", f"{what}: {_cause(error)}") from error
        except requests.exceptions.RequestException as error:
            raise ApiError("not_proxmox", f"{what}: {_cause(error)}") from error
        except (KeyError, TypeError) as error:
            raise ApiError("not_proxmox", f"{what}: the answer has no data; this is no Proxmox API") from error
        # proxmoxer's word for no JSON. That pvesh prints the log of the task that a change began is nothing bad.
        page = data.get("errors") if isinstance(data, dict) else None
        if isinstance(page, bytes) or (isinstance(page, str) and page and method == "GET"):
            raise ApiError("not_proxmox", f"{what}: the answer is not JSON: {page[:80]!r}")
        return data

    def follow(self, upid: str, what: str) -> None:
        """Wait until task ``upid`` has ended, well: its warnings are kept, its failure raises with the log's tail.

        ``stopped`` alone is no success; only ``OK`` and ``WARNINGS: N`` are.
        """
        self.upids.append(upid)
        path = f"nodes/{upid.split(':')[1]}/tasks/{quote(upid, safe='')}"
        deadline = self._clock() + self._task_timeout
        intervals = iter(_TASK_INTERVALS)
        while True:
            trouble = ""
            try:
                status = self._call("GET", f"{path}/status", {})
            except ApiError as error:
                if error.kind == "bad_request":
                    raise ApiError("task_lost", f"{what}: the node does not know its task {upid} any more") from error
                if error.kind not in _POLL_AGAIN:
                    raise ApiError(
                        error.kind, f"{what}: its task {upid} runs on, but cannot be watched: {error}", error.status
                    ) from error
                # The task runs on whatever happens to this connection: keep looking until the deadline.
                status, trouble = {}, f" (the last look: {error})"
            if status.get("status") == "stopped":
                break
            if self._clock() > deadline:
                raise ApiError(
                    "task_timeout",
                    f"{what}: task {upid} has not ended within {self._task_timeout:g} s{trouble}; it goes on, and "
                    "the next run takes it up",
                )
            self._sleep(next(intervals, _TASK_INTERVALS[-1]))
        result = str(status.get("exitstatus", ""))
        if result == "OK":
            return
        tail = self._log_tail(path)
        if result.startswith("WARNINGS"):
            self.warnings += [line for line in tail if "WARN" in line.upper()] or [f"{what}: {result}"]
            return
        kind = classify(500, result)
        raise ApiError(
            "task_failed" if kind == "refused" else kind,
            "\n".join([f"{what} failed: {result or 'it ended without a result'} (task {upid})", *tail]),
            ended=True,
        )

    def _log_tail(self, path: str) -> list[str]:
        try:
            lines = self.get(f"{path}/log", limit=0)
            return [line.get("t", "") for line in sorted(lines, key=lambda line: line.get("n", 0))][-_LOG_TAIL:]
        except ApiError as error:
            return [f"(its log cannot be read: {error})"]


def _tls(what: str, cause: str) -> ApiError:
    """A failed handshake: a certificate that is not the expected one, or a port where nobody speaks TLS."""
    if re.search("certificate|[Ff]ingerprint|[Hh]ostname", cause):
        return ApiError("tls", f"{what}: the certificate is not trusted: {cause}")
    return ApiError("not_proxmox", f"{what}: what answers there does not speak TLS: {cause}")


def _fields(error) -> dict[str, str]:
    """What a ResourceException says of each parameter; pvesh has it in the lines behind the first."""
    if isinstance(error.errors, dict):
        return {name: str(why).strip() for name, why in error.errors.items() if isinstance(why, str)}
    return dict(re.findall(r"^([\w.-]+): (.+)$", str(error.content or ""), re.M)) if error.status_code == 400 else {}


def _cause(error) -> str:
    """The innermost reason of a requests exception, which wraps urllib3's, which wraps the system's."""
    seen = error
    while True:
        inner = getattr(seen, "reason", None) or (seen.args[0] if getattr(seen, "args", None) else None)
        if not isinstance(inner, Exception) or inner is seen:
            break
        seen = inner
    return str(seen)


class Pinned(HTTPAdapter):
    """HTTPS to the server that has exactly this certificate: its SHA-256 fingerprint, checked in every handshake."""

    def __init__(self, fingerprint: str):
        self._fingerprint = fingerprint
        super().__init__()

    def init_poolmanager(self, *args, **kwargs):
        super().init_poolmanager(*args, assert_fingerprint=self._fingerprint, **kwargs)

    def proxy_manager_for(self, proxy, **kwargs):
        return super().proxy_manager_for(proxy, assert_fingerprint=self._fingerprint, **kwargs)


class Ticket(ProxmoxHTTPAuthBase):
    """The identity of a user by password. proxmoxer's own logs in past the session, and so past a fingerprint."""

    def __init__(self, user: str, password: str, **options):
        super().__init__(**options)
        self._user, self._password = user, password
        self._ticket = self._csrf = ""

    def login(self, send) -> None:
        """Get a ticket through ``send(method, path, params)``."""
        self._ticket = self._csrf = ""
        data = send("POST", "access/ticket", {"username": self._user, "password": self._password})
        if data.get("NeedTFA"):
            raise ApiError(
                "unauthorized", f"{self._user} has a second factor, which no program can give: use an API token", 401
            )
        self._ticket, self._csrf = data["ticket"], data["CSRFPreventionToken"]

    def get_cookies(self):
        return cookiejar_from_dict({"PVEAuthCookie": self._ticket} if self._ticket else {})

    def __call__(self, request):
        if request.method != "GET" and self._csrf:
            request.headers["CSRFPreventionToken"] = self._csrf
        return request


def connect(options: dict) -> Api:
    """The API with the identity that the options of doc fragment ``pve`` give: token, password or the node itself.

    Nothing is sent yet. Raises ApiError for options that cannot lead to one.
    """
    if options.get("api_via") == "node":
        node = connect_root(options)
        if node is None:
            raise ApiError("no_root_way", "api_via is node, and root_via says that there is no way to pvesh on it")
        return node
    host, port, user = options["api_host"], options["api_port"], options.get("api_user")
    name = f"[{host}]" if ":" in host else host
    where = f"https://{name}:{port}"
    shared = {"verify_ssl": _verify(options), "timeout": options["api_timeout"], "service": "PVE"}
    if user and options.get("api_password"):
        auth = Ticket(user, options["api_password"], **shared)
    elif user and options.get("api_token_id") and options.get("api_token_secret"):
        token = options["api_token_id"].rpartition("!")[2]
        auth = ProxmoxHTTPApiTokenAuth(user, token, options["api_token_secret"], **shared)
    else:
        raise ApiError("no_credentials", f"{where}: neither a token with its secret nor a password is given")
    session = ProxmoxHttpSession()
    session.auth = auth
    session.headers["accept"] = JsonSerializer().get_accept_types()
    if options.get("api_fingerprint"):
        session.mount("https://", Pinned(_fingerprint(options["api_fingerprint"])))
    # A proxy for the internet is not one for this machine.
    session.trust_env = not (host in ("localhost", "::1") or host.startswith("127."))
    resource = ProxmoxResource(base_url=f"{where}/api2/json", session=session, serializer=JsonSerializer())
    return Api(resource, where, options["lock_timeout"], options["task_timeout"], getattr(auth, "login", None))


def _verify(options: dict) -> bool | str:
    """What requests verifies certificates against; an explicit choice holds whatever the environment says.

    requests lets REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE take the place of True alone. With a fingerprint and no
    authority, the fingerprint is the verification.
    """
    if options.get("api_ca_path"):
        path = Path(options["api_ca_path"]).expanduser()
        if not path.is_file():
            raise ApiError("no_ca", f"api_ca_path is {str(path)!r}: there is no such file")
        return str(path)
    return not options.get("api_fingerprint")


def _fingerprint(text: str) -> str:
    """The 64 digits of a SHA-256 fingerprint, as Proxmox shows it with colons between them."""
    digits = text.replace(":", "").lower()
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ApiError("bad_fingerprint", "a SHA-256 fingerprint has 64 hexadecimal digits")
    return digits


def identity(options: dict) -> str:
    """Who the API sees: ``root@pam`` or ``root@pam!token``."""
    if options.get("api_via") == "node":
        return "root@pam"
    if options.get("api_password"):
        return options["api_user"]
    return f"{options.get('api_user')}!{(options.get('api_token_id') or '').rpartition('!')[2]}"


class PveshSession(CommandBaseSession):
    """proxmoxer's command session with a prefix: run here, or behind ``ssh`` with its host key verified.

    pvesh runs the task that a change begins in the foreground, so a change takes as long as its task may.
    """

    def __init__(self, prefix: list[str], timeout: float, task_timeout: float):
        super().__init__(service="PVE", timeout=timeout)
        self._prefix, self._timeout, self._task_timeout = prefix, timeout, task_timeout

    def request(self, method, url, **more):
        self.timeout = self._timeout if method == "GET" else self._timeout + self._task_timeout
        return super().request(method, url, **more)

    def _exec(self, cmd):
        # One shell word for ssh, which joins its arguments with spaces; pvesh corrupts text without a UTF-8 locale.
        full = [*self._prefix, f"LC_ALL=C.UTF-8 {shlex.join(cmd)}"] if self._prefix else cmd
        try:
            done = run_on_node(full, self.timeout)
        except subprocess.TimeoutExpired as error:
            raise ApiError(
                "timeout",
                f"{full[0]} … pvesh gave no answer within {self.timeout:g} s; whether it took effect is not known",
            ) from error
        except OSError as error:
            raise ApiError("unreachable", f"{full[0]} cannot be run here: {error.strerror}") from error
        stderr = done.stderr
        if self._prefix and done.returncode == 255 and _SSH_FAILED.search(stderr):
            raise ApiError("unreachable", f"ssh to the node failed: {stderr.strip()}")
        # proxmoxer takes any stderr for a failure and an empty one for success: the exit code decides.
        return (
            done.stdout,
            ("" if done.returncode == 0 else stderr or f"pvesh ended with {done.returncode}"),
            done.returncode,
        )


# What sshd does to connections above its MaxStartups, before it knows whose they are.
_TURNED_AWAY = re.compile(r"kex_exchange_identification|banner exchange")
_SSH_FAILED = re.compile(rf"^(ssh:|.*Permission denied|Host key|{_TURNED_AWAY.pattern})", re.M)


def run_on_node(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command line, here or behind ``ssh_prefix``, for at most ``timeout`` seconds.

    An sshd that many containers' tasks reach at once turns some away. Nothing has begun there then, so those try again,
    spread out. Raises subprocess.TimeoutExpired, and OSError where the program cannot be run here.
    """
    deadline, pause = time.monotonic() + timeout, 0.5
    while True:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=max(deadline - time.monotonic(), 0.1),
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            check=False,
        )
        turned_away = command[0] == "ssh" and done.returncode == 255 and _TURNED_AWAY.search(done.stderr)
        wait = pause * random.uniform(0.5, 1.5)
        if not turned_away or time.monotonic() + wait > deadline:
            return done
        time.sleep(wait)
        pause = min(2 * pause, 4)


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
    session = PveshSession(prefix, options["api_timeout"], options["task_timeout"])
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
