# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node as a whole: the order in which its parts come up and go down, and what it tells its clients."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import shutil
import stat

from ansible_collections.dflash.launchproof.plugins.module_utils.node import machine, parts

MARK = "launchproof"  # the tag of the containers that are ours
REGION = "us-east-1"  # the server takes any; clients want one


class Service:
    """One local node; settings are the parameters of module local_node_service."""

    def __init__(self, settings, environment=None):
        try:
            network = ipaddress.ip_network(settings["network"])
        except ValueError as error:
            raise parts.NodeError(
                f"local_node_network={settings['network']}: {error}; give a network such as 198.51.100.0/24"
            ) from None
        if network.version != 4 or not 16 <= network.prefixlen <= 29:
            raise parts.NodeError(f"local_node_network={network}: give an IPv4 network between /16 and /29")
        self.node = parts.Node(settings, environment)
        self.bridge = parts.Bridge(self.node)
        self.built = [parts.Environment(self.node), parts.Template(self.node)]
        self.daemons = [parts.Sshd(self.node), parts.Api(self.node), parts.S3(self.node)]
        others = [parts.Nat(self.node), parts.Forwarding(self.node), parts.Tools(self.node)]
        self.parts = [parts.Files(self.node), *self.built, self.bridge, *others, *self.daemons, Outputs(self)]

    @contextlib.contextmanager
    def lock(self, dry, down):
        """Hold the node's lock: two runs at once would start everything twice. A dry run takes none and makes no file."""
        if dry or (down and not (self.node.dir / "node.json").exists()):
            yield
            return
        self.node.dir.mkdir(parents=True, exist_ok=True)
        with open(self.node.dir / "lock", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def look(self):
        """{part: up, or why not}."""
        return {part.name: part.look() for part in self.parts}

    def up(self, dry):
        """Bring up what is not; a dry run only says what that would be."""
        before = self.look()
        wanted = [part for part in self.parts if before[part.name] != "up"]
        if self.bridge in wanted:
            self.bridge.check()
        for daemon in self.daemons:
            if daemon in wanted:
                daemon.check()
        result = self._result(before, wanted)
        result["outputs"] = self.outputs()
        result["program"] = self.node.program()
        result["missing_packages"] = self.node.missing_packages()
        if dry:
            return result
        building = [part for part in wanted if part in self.built]
        for part in wanted:
            if building and part not in self.built and part.name != "files":
                # Both take long and neither needs the other.
                parts.finish_together(building)
                building = []
            if part not in self.built:
                part.up()
        if building:
            parts.finish_together(building)
        return result

    @staticmethod
    def _result(before, wanted):
        after = {**before, **{part.name: "up" for part in wanted}}
        return {
            "changed": bool(wanted),
            "parts": before,
            "changed_parts": [part.name for part in wanted],
            "diff": {"before": _lines(before), "after": _lines(after)},
        }

    def secret_environment(self):
        """The containers' index and proxy settings that carry a user or password: for outputs.json alone, never a result."""
        return machine.container_needs("/", self.node.environment)["secret_environment"]

    def outputs(self):
        """What the node's clients and containers need to know; secrets by the name of their file."""
        node = self.node
        folder = node.dir
        needs = machine.container_needs("/", node.environment)
        api = {
            "host": "127.0.0.1", "port": node.settings["api_port"], "url": f"https://127.0.0.1:{node.settings['api_port']}",
            "ca": str(folder / "tls/ca.pem"), "user": "root@pam", "token_id": node.settings["token_id"],
            "token_secret_file": str(folder / "secrets/api_token"), "password_file": str(folder / "secrets/root_password"),
            "node": node.settings["node"], "storage": "local", "template": f"local:vztmpl/{node.settings['template']}",
            "bridge": node.bridge, "gateway": node.gateway, "network": str(node.network),
        }  # fmt: skip
        return {
            "api": api,
            "ssh": {"host": "127.0.0.1", "port": node.settings["ssh_port"], "user": "root", "key": str(folder / "ssh/id_ed25519"),
                    "known_hosts": str(folder / "ssh/known_hosts")},
            "s3": {"endpoint": f"http://{node.gateway}:{node.settings['s3_port']}", "bucket": node.settings["s3_bucket"], "region": REGION,
                   "access_key_file": str(folder / "s3/access_key"), "secret_key_file": str(folder / "s3/secret_key")},
            "access_log": str(folder / "log/access.log"),
            "ca_certificates": needs["authorities"],
            "pip_environment": needs["environment"],
            "find_links": needs["find_links"],
            "wheel_mounts": [{"source": path, "target": path, "read_only": True} for path in needs["mounts"]],
        }  # fmt: skip

    # ------------------------------------------------------------------ down

    def down(self, purge, force, dry):
        """Take everything away that the node added to the machine; refuse over what is not ours."""
        node = self.node
        containers = node.containers()
        self._refuse_foreign(containers, force)
        before = {part.name: self._present(part) for part in self.parts}
        before["containers"] = ",".join(containers) or "absent"
        gone = [name for name, state in before.items() if state != "absent"]
        if purge and node.dir.exists():
            gone.append("state folder")
        after = dict.fromkeys(before, "absent")
        result = {"changed": bool(gone), "parts": before, "changed_parts": gone, "program": node.program(),
                  "diff": {"before": _lines(before), "after": _lines(after)}}  # fmt: skip
        if dry:
            return result
        # The daemons first: an API that lives on would start or make containers behind our back.
        for daemon in self.daemons:
            daemon.down()
        if containers:
            # By LXC itself: the API may be what is broken.
            destroy = ["/usr/bin/python3", "-m", "launchproof_node.destroy", str(node.dir)]
            parts.run(
                *destroy,
                environment={"PATH": parts.SYSTEM_PATH, "PYTHONPATH": str(node.lib), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        for part in reversed(self.parts):
            part.down()
        if purge:
            shutil.rmtree(node.dir, ignore_errors=True)
        return result

    def _present(self, part):
        """present or absent, for what down() takes away."""
        if isinstance(part, parts.Daemon):
            return "present" if part.pid() else "absent"
        if part is self.bridge:
            return "absent" if part.look() in ("absent", "foreign") else "present"
        if part.name == "nat":
            return "absent" if part.look() == "absent" else "present"
        if part.name == "forwarding":
            return "present" if "ip_forward" in self.node.machine else "absent"
        if part.name == "tools":
            return "present" if part.present() else "absent"
        return "absent"

    def _refuse_foreign(self, containers, force):
        if force:
            return
        unmarked = [vmid for vmid, (tags, _running) in containers.items() if MARK not in tags]
        if unmarked:
            raise parts.NodeError(f"local_node_force=false: container {unmarked[0]} of this node does not carry the tag {MARK}, so it may be "
                                  "somebody's; remove it, tag it, or set local_node_force=true to destroy it too")  # fmt: skip
        if self.bridge.look() not in ("absent", "foreign"):
            for port in self.bridge.ports():
                found = parts.VETH.fullmatch(port)
                if not found or found[1] not in containers:
                    raise parts.NodeError(f"local_node_force=false: interface {port} on {self.node.bridge} is not of a container of this "
                                          "node; take it off the bridge, or set local_node_force=true")  # fmt: skip


class Outputs:
    """What the node tells its clients, as a file that root alone can read."""

    name = "outputs"
    mode = 0o600

    def __init__(self, service):
        self.service = service
        self.path = service.node.dir / "outputs.json"

    def _text(self):
        outputs = {**self.service.outputs(), "secret_environment": self.service.secret_environment()}
        return json.dumps(outputs, indent=2, sort_keys=True) + "\n"

    def look(self):
        """up, absent or differs."""
        try:
            same = self.path.read_text() == self._text() and stat.S_IMODE(self.path.stat().st_mode) == self.mode
        except OSError:
            return "absent"
        return "up" if same else "differs"

    def up(self):
        """Write it."""
        parts.write(self.path, self._text(), self.mode)

    def down(self):
        """A client must not find a node that is not there."""
        self.path.unlink(missing_ok=True)


def _lines(states):
    return "".join(f"{name}: {state}\n" for name, state in states.items())
