# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The argument specs of the Proxmox modules; their words are in plugins/doc_fragments/pve.py."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

from ansible.module_utils.basic import missing_required_lib
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api, plan


def connection() -> dict:
    """Options of doc fragment ``pve``."""
    return {
        "api_host": {"type": "str", "required": True},
        "api_port": {"type": "int", "default": 8006},
        "api_user": {"type": "str", "required": True},
        "api_token_id": {"type": "str", "no_log": False},
        "api_token_secret": {"type": "str", "no_log": True},
        "api_password": {"type": "str", "no_log": True},
        "api_ca_path": {"type": "path"},
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
        ),
        "int": ("disk_gib", "cores", "cpuunits", "memory", "swap"),
        "float": ("cpulimit",),
        "bool": ("unprivileged", "onboot", "protection"),
    }
    options = {name: {"type": kind} for kind, names in kinds.items() for name in names}
    options |= {
        "vmid": {"type": "int", "required": True},
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
                "firewall": {"type": "bool"},
                "mtu": {"type": "int"},
                "rate": {"type": "float"},
                "tag": {"type": "int"},
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
                "read_only": {"type": "bool"},
                "backup": {"type": "bool"},
            }
        ),
        "ssh_public_keys": {"type": "list", "elements": "str", "no_log": False},
        "password": {"type": "str", "no_log": True},
    }
    return {"container": {"type": "dict", "required": True, "options": options}}


def require_libraries(module) -> None:
    """End the module with instructions when proxmoxer or requests is missing."""
    if api.IMPORT_ERROR:
        module.fail_json(msg=missing_required_lib("proxmoxer and requests"), exception=api.IMPORT_ERROR)


def api_problem(error: api.ApiError, params: dict) -> plan.Problem:
    """An API error as a problem: which variable to look at, and what to do."""
    who = api.identity(params)
    host = f"{params['api_host']}:{params['api_port']}"
    credential = "api_password" if params.get("api_password") else "api_token_secret"
    by_kind = {
        "unreachable": ("pve_api_host", host, "Check the address, the port (pve_api_port) and that the node is up."),
        "dropped": ("pve_api_host", host, "Something answers there and hangs up: check pve_api_port and the node."),
        "timeout": ("pve_api_host", host, "The node is overloaded or hangs; raise pve_api_timeout if it is only slow."),
        "tls": (
            "pve_api_ca_path",
            params.get("api_ca_path"),
            "Give the certificate of the node's own authority (/etc/pve/pve-root-ca.pem), and the name it certifies.",
        ),
        "no_credentials": ("pve_api_token_secret", "not given", "Give it, or pve_api_password."),
        "no_ca": ("pve_api_ca_path", params.get("api_ca_path"), "Give a file that is there, on the controller."),
        "not_proxmox": ("pve_api_host", host, "Give the address of a Proxmox API."),
        "unauthorized": (
            f"pve_{credential}",
            f"(not shown) of {who}",
            "Check user, token name and secret; `pveum user token list USER` shows the tokens.",
        ),
        "forbidden": ("pve_api_user", who, "Grant the right that is named to this user or token."),
        "node_unreachable": ("pve_node", params["node"], "Check that the node is up and part of the cluster."),
        "no_quorum": ("pve_node", params["node"], "The cluster has no quorum: bring its other nodes back first."),
    }
    variable, value, fix = by_kind.get(error.kind, ("pve_node", params["node"], "See the node's own log for more."))
    return plan.Problem(variable, value, str(error), fix)


def named(problems: list[plan.Problem], declared_as: str) -> list[plan.Problem]:
    """The problems with the declaration called what its author calls it."""
    return [replace(item, variable=re.sub(r"^container\b", declared_as, item.variable)) for item in problems]


def fail(module, problems: list[plan.Problem], **result) -> None:
    """End the module with all problems at once, in words and as data."""
    found = named(problems, module.params["declared_as"])
    lines = [item.sentence() for item in found]
    text = lines[0] if len(lines) == 1 else "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    module.fail_json(msg=text, problems=[asdict(item) for item in found], **result)


def may_be_unavailable(module, error: api.ApiError) -> bool:
    """Whether ``error`` only says that the node is not up yet, which a prediction may accept."""
    return (
        module.check_mode
        and module.params["unavailable_ok"]
        and error.kind in ("unreachable", "no_ca", "no_credentials")
    )
