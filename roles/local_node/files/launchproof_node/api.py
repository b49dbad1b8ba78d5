# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Proxmox VE API of the local node: fakepve's front, real LXC containers behind it.

fakepve (pinned: its handlers are closures over a private order of statements, which tests/unit/roles/local_node
holds it to) validates parameters, permissions, locks and wording. This module replaces what it pretends:
tasks do the work, status and process id are read from LXC, configurations are files. Whatever would still be
pretended answers 501.

Run as `python -m launchproof_node.api STATE_DIR`.
"""

import asyncio
import contextvars
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from aiohttp import web
from fakepve import FakePve
from fakepve import lxc as fake_lxc
from fakepve import schema as fake_schema
from fakepve import server as fake_server
from fakepve.model import PveError, TaskError

from . import config as node_config
from .faults import Faults
from .runtime import Failed, Runtime
from .settings import Settings
from .state import Saved, Store, running, write_atomic

log = logging.getLogger("launchproof_node")

# Requests that change something and do it for real. Every other write answers 501.
WRITES = {
    ("POST", "/access/ticket"),
    ("POST", "/nodes/{node}/lxc"),
    ("PUT", "/nodes/{node}/lxc/{vmid}/config"),
    ("PUT", "/nodes/{node}/lxc/{vmid}/resize"),
    ("DELETE", "/nodes/{node}/lxc/{vmid}"),
    ("POST", "/nodes/{node}/lxc/{vmid}/status/start"),
    ("POST", "/nodes/{node}/lxc/{vmid}/status/stop"),
    ("POST", "/nodes/{node}/lxc/{vmid}/status/shutdown"),
    ("POST", "/nodes/{node}/lxc/{vmid}/status/reboot"),
}
# Parameters of a create request that would be accepted and have no effect.
CREATE_UNSUPPORTED = ("restore", "force", "ha-managed", "bwlimit", "unique", "pool", "ignore-unpack-errors")
# What a running container takes at once here; the rest stays pending until a restart, devices and networks
# included, as seen on Proxmox VE 8.2.
HOT_FAST = (*fake_lxc.FASTPLUG,)
HOT_LIMITS = ("cores", "cpulimit", "cpuunits", "memory", "swap")
UPID = re.compile(r"UPID:[^:]+:[0-9A-F]{8}:[0-9A-F]{8,}:[0-9A-F]{8}:[^:]+:[^:]*:[^:]+:$")

# The task that the current coroutine works for, and the parameters of the request that began it.
TASK = contextvars.ContextVar("task", default=None)
REQUEST = contextvars.ContextVar("request", default=None)


class RealCt(fake_lxc.FakeCt):
    """A container whose state is read from LXC and whose configuration is a file.

    fakepve makes plain FakeCt objects; Containers turns them into these where it lists them. A property shadows
    the value that fakepve keeps in the instance.
    """

    def adopt(self, store, runtime):
        """Take over what fakepve put into the object, and save it."""
        self.store, self.runtime = store, runtime
        values = self.__dict__
        self._config = Saved(values.pop("config"), self.save)
        self._pending = Saved(values.pop("pending"), self.save)
        for name in ("status", "pid", "started_at"):
            values.pop(name, None)
        self.save()

    def save(self):
        """Write the configuration file."""
        self.store.save(self.vmid, self._config, self._pending)

    def digest(self):
        """The SHA-1 of the configuration file."""
        return node_config.digest(self._config, self._pending)

    @property
    def config(self):
        """The configuration; every change is on disk before the caller goes on."""
        return self._config

    @config.setter
    def config(self, values):
        self._config = Saved(values, self.save)
        self.save()

    @property
    def pending(self):
        """Changes that wait for a restart."""
        return self._pending

    @pending.setter
    def pending(self, values):
        self._pending = Saved(values, self.save)
        self.save()

    @property
    def status(self):
        """running or stopped, from the kernel's list of sockets."""
        return "running" if self.vmid in running() else "stopped"

    @status.setter
    def status(self, value):
        # fakepve states the outcome after its pause; here it must have happened by then.
        if value != self.status:
            raise TaskError(f"container {self.vmid} is {self.status}, expected {value}")

    @property
    def pid(self):
        """The process id of the container's init, or None; started_at is its start in seconds since the epoch."""
        return self._init()[0]

    @pid.setter
    def pid(self, value):
        pass

    @property
    def started_at(self):
        """Seconds since the epoch at which the container's init started, or None."""
        return self._init()[1]

    @started_at.setter
    def started_at(self, value):
        pass

    def _init(self):
        """(process id, start) of the running init, remembered as long as that very process lives."""
        if self.status != "running":
            return None, None
        known = self.__dict__.get("_known")
        if known is None or _start_ticks(known[0]) != known[1]:
            pid = self.runtime.init_pid(self.vmid)
            ticks = pid and _start_ticks(pid)
            if not ticks:
                return None, None
            boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            known = self.__dict__["_known"] = (pid, ticks, boot + ticks / os.sysconf("SC_CLK_TCK"))
        return known[0], known[2]


def _start_ticks(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None


class Containers(list):
    """FakePve's list of containers: what is appended becomes real, what is removed loses its file."""

    def __init__(self, store, runtime):
        super().__init__()
        self.store, self.runtime = store, runtime

    def append(self, container):
        """Add a container that fakepve or the start of the API made."""
        container.__class__ = RealCt
        container.adopt(self.store, self.runtime)
        super().append(container)

    def remove(self, container):
        """Forget a container."""
        super().remove(container)
        self.store.remove(container.vmid)


class RealPve(FakePve):
    """One node with real containers."""

    def __init__(self, settings, runtime=None, store=None):
        super().__init__(user="root@pam", password=settings.secret(settings.password_file), host=settings.api_host,
                         port=settings.api_port)  # fmt: skip
        self.settings = settings
        self.runtime = runtime or Runtime(settings)
        self.store = store or Store(settings)
        self.time_scale = 1.0
        self.cluster_name = settings.node
        self.nodes = {settings.node: {"online": True}}
        self.apitokens = {f"{self.user}!{settings.token_id}": settings.secret(settings.token_file)}
        # None would let any token set root-only keys; an empty list of grants leaves Proxmox VE's rules in force.
        self.acl = {}
        self.storages = {"local": {"type": "dir", "active": 1, "content": "rootdir,vztmpl", "files": set(),
                                   "path": str(settings.storage)}}  # fmt: skip
        self.cts = Containers(self.store, self.runtime)
        self._pids = itertools.count(os.getpid())
        self._workers = set()
        self._cpu_samples = {}
        self.faults = Faults(self)
        self.free = None  # bytes free on the storage, where a fault says so

    # ------------------------------------------------------------ life of the API

    def restore(self):
        """Take up the containers and tasks on disk; finish what a crash of the API interrupted."""
        for record in self.store.load_tasks():
            self.tasks[record["upid"]] = record
            self.tasklog.append(record)
        for vmid, (config, pending) in self.store.load().items():
            container = fake_lxc.FakeCt(vmid, node=self.settings.node, defaults=False, config=config, pending=pending)
            self.cts.append(container)
            if container.lock in ("create", "destroyed"):
                # Half made or half gone: nobody can use it, and its create task has already ended as lost.
                log.warning("container %s was left with lock %s: removed", vmid, container.lock)
                self._drop(container)

    async def start_on_boot(self):
        """Start the containers that say onboot, once a boot of the machine, as Proxmox VE does."""
        marker = self.settings.run / "boot_id"
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        if marker.exists() and marker.read_text() == boot_id:
            return
        write_atomic(marker, boot_id)
        for ct in list(self.cts):
            if ct.config.get("onboot") and ct.status == "stopped" and not ct.lock:
                await self._lxc_start("root@pam", {"node": ct.node, "vmid": ct.vmid})

    def _build_app(self):
        app = super()._build_app()
        if self.settings.faults:
            app.router.add_post("/_fault", self._fault)
        return app

    # ------------------------------------------------------------ requests

    @web.middleware
    async def _middleware(self, request, handler):
        bound = super()._middleware
        response = await bound(request, handler)
        if response.status == 401:
            await asyncio.sleep(3)  # what a failed login costs on a real node
        if (
            response.status >= 400
            and isinstance(response, web.Response)
            and response.content_type == "application/json"
        ):
            body = json.loads(response.text)
            # Proxmox VE 8.2 gives the message in the reason phrase alone; a client must not look for it in the body.
            if body.pop("message", None):
                response.text = json.dumps(body)
        with open(self.settings.logs / "access.log", "a") as out:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            out.write(f"{stamp} {request.method} {request.path} {response.status}\n")
        return response

    async def _answer(self, request, handler, generic, path_node):
        if self.settings.faults and request.path == "/_fault":
            return await handler(request)
        match = self.resolve(request, fake_server.API)
        if match is None or request.method not in match.methods:
            return _not_implemented(request)
        if request.method != "GET" and (request.method, match.template) not in WRITES:
            return _not_implemented(request)
        usual = super()._answer
        response = await self.faults.answered(request, lambda: usual(request, handler, generic, path_node))
        if not isinstance(response, web.Response):
            return response
        if response.status == 400 and "body" in json.loads(response.text).get("errors", {}):
            return _not_implemented(request)  # malformed JSON: what a real node answers
        return response

    async def answer(self, request, match, params, user, call=None):
        """FakePve's answer(), strict where fakepve is more generous than Proxmox VE."""
        declared = (match.methods[request.method].get("parameters") or {}).get("properties", {})
        for name, value in params.items():
            kind = (declared.get(name) or {}).get("type")
            if kind == "boolean" and isinstance(value, str) and value not in ("0", "1"):
                text = f"type check ('boolean') failed - got '{value}'"
                raise PveError(400, "Parameter verification failed.", {name: text})
        return await super().answer(request, match, params, user, call)

    async def synthesise(self, match, method, info, user, values):
        """Nothing is made up: an endpoint that fakepve only invents answers 501."""
        raise PveError(501, f"Method '{method} {match.template}' not implemented")

    # ------------------------------------------------------------ tasks

    async def task(self, node, ttype, tid, user, body, vm=None, lock=True, log=()):
        """FakePve.task() with work that takes time, a record on disk, and no way to end without a status."""
        upid, pid, start = self._upid(node, ttype, tid, user)
        record = {"upid": upid, "node": node, "pid": pid, "pstart": pid * 7, "starttime": start, "type": ttype,
                  "id": str(tid), "user": user, "status": "running", "log": list(log)}  # fmt: skip
        self.tasks[upid] = record
        self.tasklog.append(record)
        self.store.save_task(record)
        worker = asyncio.ensure_future(self._work(record, body, vm if lock else None, vm))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        return upid

    async def _work(self, record, body, locked, vm):
        TASK.set((record["type"], vm))
        forget = False
        try:
            status, forget = await self.faults.worked(record["type"], lambda: self._do(record, body, locked, vm))
        except (TaskError, Failed) as error:
            status = str(error)
        except PveError as error:
            status = error.message
        except Exception as error:  # a worker without a last word would be waited for for ever
            logging.getLogger("launchproof_node").exception("task %s", record["upid"])
            status = f"internal error: {error}"
        good = status == "OK" or status.startswith("WARNINGS")
        if not good:
            record["log"].append(status)
        record.update(status="stopped", exitstatus=status, endtime=int(time.time()))
        record["log"].append(f"TASK {status}" if good else "TASK ERROR: " + status)
        self.store.save_task(record)
        if forget:
            del self.tasks[record["upid"]]
            self.tasklog.remove(record)

    async def _do(self, record, body, locked, vm):
        """The work of a task under the container's file lock; its exit status."""
        if locked is not None:
            await self.acquire(locked, record["upid"])
        try:
            if record["type"] == "vzdestroy" and vm.status == "running" and (REQUEST.get() or {}).get("force"):
                await self.runtime.stop(vm.vmid)
            note = await body()
            if note:
                record["log"].append(note)
        finally:
            if locked is not None:
                self.release(locked, record["upid"])
        return "OK"

    def _get_task(self, request):
        upid = request.match_info["upid"]
        if upid not in self.tasks and UPID.match(upid):
            raise PveError(400, "Parameter verification failed.", {"upid": "no such task"})
        return super()._get_task(request)

    async def _task_log(self, request):
        upid = request.match_info["upid"]
        if upid not in self.tasks and UPID.match(upid):
            return fake_server.ok([{"n": 1, "t": "unable to open file: no such task log"}])
        return await super()._task_log(request)

    async def _task_list(self, request):
        response = await super()._task_list(request)
        if request.query.get("source") == "active":
            active = {record["upid"] for record in self.tasklog if record["status"] == "running"}
            response.text = json.dumps({"data": [t for t in json.loads(response.text)["data"] if t["upid"] in active]})
        return response

    # ------------------------------------------------------------ the work in fakepve's places

    async def pause(self, secs):
        """Where fakepve waits, the task in hand does its work; without a task it is a fault's delay."""
        current = TASK.get()
        if current is None:
            await super().pause(secs)
            return
        ttype, ct = current
        if ttype == "vzstop":
            await self.runtime.stop(ct.vmid)
        elif ttype == "vzdestroy":
            self.runtime.discard(ct.vmid)
        elif ttype == "resize":
            await self._grow(ct)

    async def ceph_io(self, vm, keys=None):
        """Called by fakepve's create once the configuration is final, inside its error handling."""
        current = TASK.get()
        if current is None or current[0] != "vzcreate" or vm.config.get("lock") == "create":
            return
        final = dict(vm.config)
        vm.config = {"lock": "create"}  # what a real node shows until the container is complete
        values = REQUEST.get()
        await self._build(vm, final, values)
        vm.config = final

    async def _build(self, ct, final, values):
        template = values["ostemplate"]
        path = Path(template) if template.startswith("/") else self.settings.templates / template.partition("/")[2]
        if self.free is not None and path.exists() and self.free < path.stat().st_size:
            raise TaskError(f"command 'tar xpf {path}' failed: No space left on device")
        try:
            await self.runtime.create(ct.vmid, final, path, values.get("password"), values.get("ssh-public-keys"))
        except Failed as error:
            raise TaskError(str(error)) from None

    def _drop(self, ct):
        # Also the way back from a failed create: what it made so far goes too.
        if ct in self.cts:
            self.runtime.discard(ct.vmid)
        super()._drop(ct)

    async def _start_steps(self, ct, user, skiplock=False):
        if not skiplock:
            self._task_lock(ct, allow=("mounted",))
        if ct.status == "running":
            raise TaskError(f"CT {ct.vmid} already running")
        self._apply(ct)
        await self._make_missing(ct)
        await self.runtime.start(ct.vmid, ct.config)

    async def _ct_powerdown(self, ct, timeout, force):
        if await self.runtime.shutdown(ct.vmid, timeout):
            return
        if not force:
            raise TaskError("container did not stop")
        await self.runtime.stop(ct.vmid)

    # ------------------------------------------------------------ configuration

    def _supported(self, values):
        try:
            node_config.check(values)
        except node_config.Unsupported as error:
            raise PveError(501, f"not implemented on the local node: {error}") from None

    async def _lxc_create(self, user, v):
        self._supported({key: value for key, value in v.items() if key not in fake_lxc.CREATE_ONLY})
        for key in CREATE_UNSUPPORTED:
            if v.get(key):
                raise PveError(501, f"not implemented on the local node: {key}={v[key]}")
        v = _as_stored(v)
        REQUEST.set(v)
        return await super()._lxc_create(user, v)

    async def _lxc_destroy(self, user, v):
        REQUEST.set(v)
        return await super()._lxc_destroy(user, v)

    async def _lxc_config_put(self, user, v):
        reserved = ("node", "vmid", "digest", "delete", "revert")
        self._supported({key: value for key, value in v.items() if key not in reserved})
        return await super()._lxc_config_put(user, _as_stored(v))

    async def _update_config(self, ct, user, values, deletes, reverts):
        before = dict(ct.config)
        await super()._update_config(ct, user, values, deletes, reverts)
        try:
            await self._make_missing(ct)
            if ct.status == "running" and any(before.get(key) != ct.config.get(key) for key in HOT_LIMITS):
                await self.runtime.apply_limits(ct.vmid, ct.config)
        except Failed as error:
            # What did not work goes back to pending, as a failed hotplug does; nothing pretends to be applied.
            log.warning("container %s: %s", ct.vmid, error)
            for key in set(before) | set(ct.config):
                if before.get(key) != ct.config.get(key):
                    ct.pending[key] = ct.config.get(key)
            ct.config = before
        for volume in _volume_ids(before) - _volume_ids(ct.config):
            self.runtime.drop_volume(volume)

    def _apply(self, ct, selection=None, running=False):
        if not running:
            super()._apply(ct, selection, False)
            return
        for key, value in sorted(ct.pending.items()):
            if (selection is None or key in selection) and (key in HOT_FAST or key in HOT_LIMITS):
                ct.pending.pop(key)
                if value is None:
                    ct.config.pop(key, None)
                else:
                    ct.config[key] = value

    async def _make_missing(self, ct):
        """Allocate the volumes that the configuration names and nobody has made yet."""
        for _key, mount in ct.volumes():
            if not self.runtime.image(mount["volume"]).exists() and "size" in mount:
                await self.runtime.make_volume(mount["volume"], fake_lxc.parse_size(mount["size"]))

    async def _lxc_resize(self, user, v):
        REQUEST.set(v)
        return await super()._lxc_resize(user, v)

    async def _grow(self, ct):
        v = REQUEST.get()
        mount = fake_lxc.parse_mount(ct.config[v["disk"]])
        text = str(v["size"])
        asked = fake_lxc.parse_size(text.lstrip("+"))
        size = asked + fake_lxc.parse_size(mount["size"]) if text.startswith("+") else asked
        await self.runtime.grow(ct.vmid, mount["volume"], size)

    # ------------------------------------------------------------ views

    async def _lxc_pending(self, user, v):
        # A real node runs over the parsed file, which has its digest as a key (PVE::GuestHelpers).
        found = await super()._lxc_pending(user, v)
        return [*found, {"key": "digest", "value": self._find_ct(v["node"], v["vmid"]).digest()}]

    def _status(self, ct):
        data = super()._status(ct)
        pid = data.get("pid")
        memory, cpu = self.runtime.usage(pid) if pid else (0, 0)
        disk = self.runtime.disk(pid)[0] if pid else 0
        data.update(mem=memory, disk=disk, cpu=self._cpu_share(ct.vmid, pid, cpu))
        for name in [name for name in data if name.startswith("pressure")]:
            del data[name]
        return data

    def _cpu_share(self, vmid, pid, seconds):
        """The share of the node's CPUs that a container used since the last time somebody asked."""
        now = time.monotonic()
        last = self._cpu_samples.get(vmid)
        self._cpu_samples[vmid] = (pid, now, seconds)
        if not pid or last is None or last[0] != pid or now <= last[1]:
            return 0
        return max(0, (seconds - last[2]) / (now - last[1]) / self.runtime.cpus)

    def ct_resources(self, user, kind=None):
        """The containers as /cluster/resources lists them, with what they really use."""
        items = super().ct_resources(user, kind)
        for item in items:
            pid = self.ct(item["vmid"]).pid
            if pid:
                item.update(mem=self.runtime.usage(pid)[0], disk=self.runtime.disk(pid)[0])
        return items

    async def _lxc_interfaces(self, user, v):
        ct = self._find_ct(v["node"], v["vmid"])
        if ct.status != "running":
            return None
        try:
            found = await self.runtime.interfaces(ct.vmid)
        except Failed as error:
            raise PveError(500, str(error)) from None
        out = []
        for interface in found:
            hwaddr = interface.get("address", "")
            item = {"name": interface["ifname"], "hwaddr": hwaddr, "hardware-address": hwaddr, "ip-addresses": []}
            for address in interface.get("addr_info", []):
                item.setdefault(address["family"], f"{address['local']}/{address['prefixlen']}")
                item["ip-addresses"].append({"ip-address-type": address["family"], "ip-address": address["local"],
                                             "prefix": str(address["prefixlen"])})  # fmt: skip
            out.append(item)
        return out

    def _space(self, store):
        found = shutil.disk_usage(store["path"])
        return found.total, found.used, found.free if self.free is None else self.free

    def _volumes(self, name):
        out = {}
        for path in sorted(self.settings.templates.glob("*.tar.*")):
            if path.suffix in (".gz", ".xz", ".zst", ".bz2"):
                found = path.stat()
                out[f"vztmpl/{path.name}"] = {"content": "vztmpl", "format": path.suffix[1:], "size": found.st_size,
                                              "ctime": int(found.st_ctime)}  # fmt: skip
        for path in sorted(self.settings.images.glob("*/*.raw")):
            found = path.stat()
            out[f"{path.parent.name}/{path.name}"] = {"content": "rootdir", "format": "raw", "size": found.st_size,
                                                      "used": found.st_blocks * 512, "vmid": int(path.parent.name),
                                                      "ctime": int(found.st_ctime)}  # fmt: skip
        return out

    def _node_stats(self, online):
        if not online:
            return {}
        memory = {name: int(value) * 1024 for name, value in
                  re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)}  # fmt: skip
        disk = shutil.disk_usage("/")
        return {"cpu": os.getloadavg()[0] / self.runtime.cpus, "maxcpu": self.runtime.cpus,
                "mem": memory["MemTotal"] - memory["MemAvailable"], "maxmem": memory["MemTotal"],
                "disk": disk.used, "maxdisk": disk.total,
                "uptime": int(time.clock_gettime(time.CLOCK_BOOTTIME))}  # fmt: skip

    def _routes_node(self):
        return [("GET", "/nodes/{node}/network", self._network)]

    async def _network(self, v, user):
        """The bridges of the machine; no other kind of interface is offered to containers."""
        kind = v.get("type")
        if kind not in (None, "bridge", "any_bridge", "any_local_bridge", "include_sdn"):
            return []
        bridges = sorted(path.parent.name for path in Path("/sys/class/net").glob("*/bridge"))
        return [{"iface": name, "type": "bridge", "active": 1, "method": "manual", "method6": "manual",
                 "families": ["inet"], "priority": n} for n, name in enumerate(bridges, 1)]  # fmt: skip

    # ------------------------------------------------------------ faults for tests

    async def _fault(self, request):
        """POST /_fault {"fault": NAME, …}: make the node fail as tests need it. Only root@pam, gone when the API restarts.

        It can grant rights, so the node offers it only where its settings say so (local_node_faults).
        """
        if request[fake_server.USER].split("!")[0] != "root@pam":
            return fake_server.error(403, "Permission check failed (user != root@pam)")
        body = await request.json()
        try:
            await self.faults.call(body.pop("fault", None), body)
        except (TypeError, ValueError) as error:
            return fake_server.error(400, str(error))
        return fake_server.ok()


def _not_implemented(request):
    path = request.path.removeprefix(fake_server.API)
    return fake_server.error(501, f"Method '{request.method} {path}' not implemented")


def _as_stored(values):
    """The values of a request as Proxmox VE writes them down, where fakepve keeps what was sent."""
    values = dict(values)
    # It keeps a description as comment lines, so that it always comes back with a line end.
    if values.get("description"):
        values["description"] = values["description"].rstrip("\n") + "\n"
    # PVE::LXC, verify_nameserver_list and verify_searchdomain_list.
    for key in ("nameserver", "searchdomain"):
        if values.get(key):
            values[key] = " ".join(filter(None, re.split(r"[,;\s]+", values[key])))
    return values


def _volume_ids(config):
    mounts = (fake_lxc.parse_mount(value) for key, value in config.items() if fake_lxc.MOUNT_KEY.match(key))
    return {mount["volume"] for mount in mounts if fake_lxc.mount_type(mount["volume"]) == "volume"}


async def serve(settings):
    """Serve until SIGTERM."""
    fake_schema.load()
    pve = RealPve(settings)
    pve.restore()
    await pve.start(str(settings.ca), str(settings.key))
    await pve.start_on_boot()
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    log.info("listening on %s", pve.url)
    await done.wait()
    await pve.stop()


def main():
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # access.log has it, without headers
    asyncio.run(serve(Settings(sys.argv[1])))


if __name__ == "__main__":
    main()
