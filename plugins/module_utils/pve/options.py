# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The argument specs of the Proxmox modules; their words are in plugins/doc_fragments/pve.py."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api, keys, plan, rights


class Module(AnsibleModule):
    """The process of a module whose work is a function of its parameters."""

    def conclude(self, work) -> None:
        """End with what ``work(params, check_mode)`` returns."""
        if api.IMPORT_ERROR:
            self.fail_json(msg=missing_required_lib("proxmoxer and requests"), exception=api.IMPORT_ERROR)
        result = work(self.params, self.check_mode)
        for text in result.pop("warnings"):
            self.warn(text)
        if result.get("failed"):
            self.fail_json(**result)
        self.exit_json(**result)

    def fail_json(self, msg, **result):
        super().fail_json(explained(msg, self.params), **result)


def explained(message: str, params: dict) -> str:
    """``message``, and why a key of Proxmox cannot be declared, where Ansible says only that it is no option."""
    declared, known = params.get("container"), container()["container"]["options"]
    unknown = [name for name in declared if name not in known] if isinstance(declared, dict) else []
    return "\n".join([*filter(None, map(keys.why_not, unknown)), message])


def connection() -> dict:
    """Options of doc fragment ``pve``."""
    return {
        "api_host": {"type": "str", "required": True},
        "api_port": {"type": "int", "default": 8006},
        "api_via": {"type": "str", "default": "https", "choices": ["https", "node"]},
        "api_user": {"type": "str"},
        "api_token_id": {"type": "str", "no_log": False},
        "api_token_secret": {"type": "str", "no_log": True},
        "api_password": {"type": "str", "no_log": True},
        "api_ca_path": {"type": "path"},
        "api_fingerprint": {"type": "str"},
        "api_timeout": {"type": "int", "default": 30},
        "lock_timeout": {"type": "int", "default": 60},
        "task_timeout": {"type": "int", "default": 600},
        "node": {"type": "str", "required": True},
        "root_via": {"type": "str", "default": "none", "choices": ["none", "local", "ssh"]},
        "root_ssh": {
            "type": "dict",
            "options": {
                "host": {"type": "str"},
                "port": {"type": "int"},
                "user": {"type": "str", "default": "root"},
                "key_file": {"type": "path", "no_log": False},
                "known_hosts_file": {"type": "path"},
            },
        },
        "unavailable_ok": {"type": "bool", "default": False},
        "declared_as": {"type": "str", "default": "container"},
    }


def container() -> dict:
    """Option ``container`` of doc fragment ``pve.container``."""

    def listed(options: dict) -> dict:
        return {"type": "list", "elements": "dict", "options": options}

    kinds = {
        "str": (
            "hostname",
            "description",
            "template",
            "storage",
            "startup",
            "nameserver",
            "searchdomain",
            "timezone",
            "hookscript",
            "pool",
        ),
        "int": ("disk_gib", "cores", "cpuunits", "memory", "swap", "tty"),
        "float": ("cpulimit",),
        "bool": ("unprivileged", "onboot", "protection", "console", "debug"),
    }
    options = {name: {"type": kind} for kind, names in kinds.items() for name in names}
    options |= {
        "vmid": {"type": "int", "required": True},
        "cmode": {"type": "str", "choices": ["tty", "console", "shell"]},
        "tags": {"type": "list", "elements": "str"},
        "features": {
            "type": "dict",
            "options": {
                **{name: {"type": "bool"} for name in ("nesting", "keyctl", "fuse", "mknod", "force_rw_sys")},
                "mount": {"type": "list", "elements": "str"},
            },
        },
        "networks": listed(
            {
                "name": {"type": "str", "required": True},
                "bridge": {"type": "str", "required": True},
                **{name: {"type": "str"} for name in ("ip", "gw", "ip6", "gw6", "hwaddr")},
                **{name: {"type": "bool"} for name in ("firewall", "link_down", "host_managed")},
                "mtu": {"type": "int"},
                "rate": {"type": "float"},
                "tag": {"type": "int"},
                "trunks": {"type": "list", "elements": "int"},
            }
        ),
        "devices": listed(
            {
                "path": {"type": "path", "required": True},
                "mode": {"type": "str"},
                "uid": {"type": "int"},
                "gid": {"type": "int"},
                "deny_write": {"type": "bool"},
            }
        ),
        "mounts": listed(
            {
                "target": {"type": "str", "required": True},
                "source": {"type": "str"},
                "storage": {"type": "str"},
                "size_gib": {"type": "int"},
                **{
                    name: {"type": "bool"}
                    for name in ("read_only", "backup", "acl", "quota", "replicate", "shared", "keepattrs")
                },
                "mountoptions": {
                    "type": "list",
                    "elements": "str",
                    "choices": ["discard", "lazytime", "noatime", "nodev", "noexec", "nosuid"],
                },
                "idmap": {"type": "str"},
            }
        ),
        "ssh_public_keys": {"type": "list", "elements": "str", "no_log": False},
        "password": {"type": "str", "no_log": True},
    }
    return {"container": {"type": "dict", "required": True, "options": options}}


def api_problem(error: api.ApiError, params: dict) -> plan.Problem:
    """An API error as a problem: which variable to look at, and what to do."""
    who = api.identity(params)
    host = f"{params['api_host']}:{params['api_port']}"
    vmid = params["container"]["vmid"]
    credential = "api_password" if params.get("api_password") else "api_token_secret"
    trust = "pve_api_fingerprint" if params.get("api_fingerprint") else "pve_api_ca_path"
    right = rights.refused(str(error)) if error.kind == "forbidden" else None
    if right:
        return plan.Problem("pve_api_user", who, str(error), f"As root on a node: {right.grant(who)}")
    if error.fields:
        # One variable a problem: the first, which Proxmox's words name with all the others.
        name = next(iter(error.fields))
        entry = keys.find(name)
        option = entry.text if entry and entry.word == "managed" else name
        value = params["container"].get(option, "(see the message)")
        return plan.Problem(f"container.{option}", value, str(error), "Correct that value.")
    locked = "Wait for what holds it to end (a backup, a snapshot, a migration), or raise pve_lock_timeout."
    by_kind = {
        "unreachable": ("pve_api_host", host, "Check the address, the port (pve_api_port) and that the node is up."),
        "dropped": ("pve_api_host", host, "Something answers there and hangs up: check pve_api_port and the node."),
        "timeout": ("pve_api_host", host, "The node is overloaded or hangs; raise pve_api_timeout if it is only slow."),
        "overloaded": ("pve_api_host", host, "Look at pveproxy and the load of the node, then run again."),
        "tls": (
            trust,
            params.get(trust.removeprefix("pve_")),
            "Give the fingerprint of the certificate the node has now (`pvenode cert info`), once you know why it changed."
            if params.get("api_fingerprint")
            else "Give the certificate of the node's own authority (/etc/pve/pve-root-ca.pem), and the name it certifies.",
        ),
        "no_credentials": (
            "pve_api_token_secret",
            "not given",
            "Give pve_api_user with a token's name and secret, or with pve_api_password; or say pve_api_via: node.",
        ),
        "bad_fingerprint": (
            "pve_api_fingerprint",
            params.get("api_fingerprint"),
            "Copy it from `pvenode cert info --output-format json` on the node.",
        ),
        "no_root_way": ("pve_root_via", params["root_via"], "Say local (this machine is the node) or ssh."),
        "no_ca": ("pve_api_ca_path", params.get("api_ca_path"), "Give a file that is there, on the controller."),
        "not_proxmox": ("pve_api_host", host, "Give the address and port (pve_api_port) of a Proxmox API."),
        "unauthorized": (
            f"pve_{credential}",
            f"(not shown) of {who}",
            "Check user, token name and secret; `pveum user token list USER` shows the tokens.",
        ),
        "forbidden": ("pve_api_user", who, "Grant the right that is named to this user or token."),
        "node_unreachable": ("pve_node", params["node"], "Check that the node is up and part of the cluster."),
        "no_quorum": ("pve_node", params["node"], "The cluster has no quorum: bring its other nodes back first."),
        "locked": ("pve_lock_timeout", params["lock_timeout"], locked),
        "task_timeout": (
            "pve_task_timeout",
            params["task_timeout"],
            "Raise it if the task is only slow, and run again.",
        ),
        "storage_full": ("container.vmid", vmid, "Free space on its storage, or choose another, and run again."),
        "conflict": ("container.vmid", vmid, "Somebody else changes this container; run again when they are through."),
    }
    last = ("container.vmid", vmid, "Put right what Proxmox names, and run again.")
    return plan.Problem(*by_kind.get(error.kind, last)[:2], str(error), by_kind.get(error.kind, last)[2])


def config_problem(error: Exception, params: dict) -> plan.Problem:
    """A value of the container's configuration that cannot be read, as a problem."""
    return plan.Problem("container", params["container"]["vmid"], str(error), "Correct that value.")


def named(problems: list[plan.Problem], declared_as: str) -> list[plan.Problem]:
    """The problems with the declaration called what its author calls it."""
    return [replace(item, variable=re.sub(r"^container\b", declared_as, item.variable)) for item in problems]


def failure(problems: list[plan.Problem], params: dict, note: str = "", **result) -> dict:
    """What a module returns that cannot do what is asked: all problems at once, in words and as data; ``note`` is a last line."""
    found = named(problems, params["declared_as"])
    lines = [item.sentence() for item in found]
    text = lines[0] if len(lines) == 1 else "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    message = "\n".join(filter(None, [text, note]))
    return {"failed": True, "msg": message, "problems": [asdict(item) for item in found], **result}


def may_be_unavailable(params: dict, error: api.ApiError) -> bool:
    """Whether ``error`` only says that the node is not up yet, which a prediction may accept."""
    return params["unavailable_ok"] and error.kind in ("unreachable", "no_ca", "no_credentials")
