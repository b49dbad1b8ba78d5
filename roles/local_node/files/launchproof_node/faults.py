# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults on demand, for tests: what a node, its network and other people do to a client at the wrong moment.

POST /_fault {"fault": NAME, …}. Everything is gone when the API restarts.
"""

import asyncio
import socket
import struct

from aiohttp import web

# What access.log says of a request whose connection was closed: nothing reaches the client.
CLOSED = 499


class Faults:
    """The faults of one API; its public methods are what /_fault offers."""

    def __init__(self, pve):
        self._pve = pve
        self._answers = []
        self._tasks = []
        self._healed = asyncio.Event()

    async def call(self, name, values):
        """Do what fault NAME does; raises ValueError or TypeError for what is none."""
        if name not in NAMES:
            raise ValueError(f"unknown fault; known: {', '.join(NAMES)}")
        result = getattr(self, name)(**values)
        if asyncio.iscoroutine(result):
            await result

    # ------------------------------------------------------------ of a request

    def fail(self, method, suffix, status, message, html=False, times=None):
        """Answer requests whose path ends so with an error, TIMES times."""
        self._pve.fail(method, suffix, status, message, html, times=times)

    def answer(self, method, suffix, then=None, before=False, meanwhile=None, times=1):
        """Lose the answer to requests whose path ends so, TIMES times.

        then: drop, reset or hang the connection, cut the body, or answer a page or no data; before: without having
        done what was asked. meanwhile: a fault (a dict with `fault`) that happens first, as if somebody else did it.
        """
        if then not in (None, "drop", "reset", "hang", "cut", "page", "nothing"):
            raise ValueError(f"cannot {then}")
        self._answers.append([method, suffix, then, before, meanwhile, times])

    async def answered(self, request, handler):
        """The answer to a request, with its fault if there is one."""
        rule = self._next(self._answers, lambda rule: rule[0] == request.method and request.path.endswith(rule[1]))
        if rule is None:
            return await handler()
        _method, _suffix, then, before, meanwhile, _times = rule
        if meanwhile:
            values = dict(meanwhile)
            await self.call(values.pop("fault"), values)
        response = None if before else await handler()
        if then is None:
            return response
        if then == "page":
            return web.Response(text="<html><body>Please log in</body></html>", content_type="text/html")
        if then == "nothing":
            return web.json_response({})
        if then == "hang":
            await self._healed.wait()
        response = web.StreamResponse(status=CLOSED)
        if then == "cut":
            response = web.StreamResponse()
            response.content_type, response.content_length = "application/json", 1000
            await response.prepare(request)
            await response.write(b'{"data": {"sta')
        if then == "reset":
            linger = struct.pack("ii", 1, 0)
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.transport.abort()
        else:
            request.transport.close()
        return response

    def network(self, **values):
        """Latency, jitter, drop_rate, hang_rate and hang_secs of all requests: seconds, and shares of 1."""
        self._pve.network.update(values)

    # ------------------------------------------------------------ of a task

    def task(self, kind, result=None, work=True, seconds=0, hold=False, forget=False, times=1):
        """Spoil the next TIMES tasks of a kind such as vzstart.

        seconds: how long it takes more; hold: until heal; result: its exit status, in place of its work where WORK is
        false; forget: nobody knows it afterwards.
        """
        self._tasks.append([kind, result, work, seconds, hold, forget, times])

    async def worked(self, kind, body):
        """Do a task's work, with its fault if there is one; (exit status, whether it is to be forgotten)."""
        rule = self._next(self._tasks, lambda rule: rule[0] == kind)
        if rule is None:
            return await body(), False
        _kind, result, work, seconds, hold, forget, _times = rule
        await asyncio.sleep(seconds)
        if hold:
            await self._healed.wait()
        status = await body() if work else "OK"
        return (status if result is None else result), forget

    # ------------------------------------------------------------ of the node

    def quorum(self, quorate):
        """Lose or regain the cluster's quorum."""
        self._pve.quorate = quorate

    def node(self, online):
        """Take the node off the cluster, or bring it back."""
        self._pve.set_node_offline(self._pve.settings.node, offline=not online)

    def storage(self, avail=None, active=True):
        """The bytes that are free on the storage, as far as anybody is told; null: what there is."""
        self._pve.free = avail
        self._pve.storages["local"]["active"] = int(active)

    def heal(self):
        """Undo all of these, and let go what hangs or is held."""
        self._pve.failures.clear()
        self._answers.clear()
        self._tasks.clear()
        self._pve.lock_wait = 10
        self._pve.network.update(latency=0.0, jitter=0.0, drop_rate=0.0, hang_rate=0.0)
        self.quorum(True)
        self.node(True)
        self.storage()
        self._healed.set()
        self._healed = asyncio.Event()

    # ------------------------------------------------------------ of other people

    def lock(self, vmid, lock):
        """The lock in a container's configuration (backup, snapshot, …); null removes it."""
        self._pve.ct(vmid).lock = lock

    async def hold(self, vmid, seconds=None, wait=None):
        """The file lock that a running operation holds, for SECONDS or until let_go; others wait 10 s for it, or WAIT."""
        if wait is not None:
            self._pve.lock_wait = wait
        await self._pve.hold_config_lock(vmid, seconds)

    def let_go(self, vmid):
        """Release that lock."""
        self._pve.release_config_lock(vmid)

    def change(self, vmid, key, value):
        """Somebody else sets a key of a container; null removes it."""
        config = self._pve.ct(vmid).config
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value

    async def power(self, vmid, running):
        """Somebody else starts or stops a container, for real."""
        if running:
            await self._pve.runtime.start(vmid, self._pve.ct(vmid).config)
        else:
            await self._pve.runtime.stop(vmid)

    def grant(self, user, path, privileges):
        """Give rights on a path."""
        self._pve.grant(user, path, *privileges)

    def revoke(self, user):
        """Take all rights of a user or token."""
        self._pve.acl.pop(user, None)

    def user(self, user, password):
        """Make a user with a password."""
        self._pve.users[user] = password

    def token(self, token, secret):
        """Make an API token, USER@REALM!NAME."""
        self._pve.apitokens[token] = secret

    def revoke_tickets(self):
        """Let every login ticket expire."""
        self._pve.revoke_tickets()

    @staticmethod
    def _next(rules, matches):
        """The first rule that matches, one of its times used up."""
        for rule in rules:
            if matches(rule):
                rule[-1] -= 1
                if rule[-1] <= 0:
                    rules.remove(rule)
                return rule
        return None


NAMES = sorted(name for name in vars(Faults) if not name.startswith("_") and name not in ("call", "answered", "worked"))
