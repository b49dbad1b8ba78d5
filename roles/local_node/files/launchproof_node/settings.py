# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where things lie on the node: the settings that the role wrote, and the paths that follow from them."""

import json
from pathlib import Path

# LXC's own default, as on a Proxmox VE node: lxc-attach -n VMID works without options.
LXC_PATH = Path("/var/lib/lxc")
# First id and number of ids of an unprivileged container, as on a Proxmox VE node (/etc/subuid there).
ID_SHIFT = 100000
ID_COUNT = 65536


class Settings:
    """The node's settings: the keys of node.json as attributes, and paths below its state folder."""

    def __init__(self, directory):
        """Read DIRECTORY/node.json; raises OSError or ValueError when it is missing or no JSON."""
        self.dir = Path(directory)
        data = json.loads((self.dir / "node.json").read_text())
        self.node = data["node"]
        self.api_host = data["api_host"]
        self.api_port = int(data["api_port"])
        self.gateway = data["gateway"]
        self.nameservers = data["nameservers"]
        self.searchdomain = data["searchdomain"]
        # Settings that an older program wrote do not say: programs come into use before the settings are written anew.
        self.faults = data.get("faults", False)
        self.ca = self.dir / "tls/ca.pem"
        self.key = self.dir / "tls/key.pem"
        self.password_file = self.dir / "secrets/root_password"
        self.token_file = self.dir / "secrets/api_token"
        self.token_id = data["token_id"]
        self.storage = self.dir / "storage"
        self.images = self.storage / "images"
        self.templates = self.storage / "template/cache"
        self.configs = self.dir / "pve/nodes" / self.node / "lxc"
        self.tasks = self.dir / "pve/tasks"
        self.logs = self.dir / "log"
        self.run = self.dir / "run"

    def secret(self, path):
        """The one line in a secret file."""
        return path.read_text().strip()
