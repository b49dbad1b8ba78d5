# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""fakepve as Proxmox VE is, where the two differ and a test is about the difference."""

from __future__ import annotations

import pytest
from fakepve import FakePve
from fakepve.lxc import split_props


@pytest.fixture(autouse=True)
def rights_of_pools_are_told(monkeypatch):
    """PVE::RPCEnvironment, get_effective_permissions: each guest of a pool is listed, with what the pool gives on it."""
    usual = FakePve._permissions

    async def permissions(self, v, user):
        told = await usual(self, v, user)
        names = {name for entries in (self.acl or {}).values() for _path, names in entries for name in names}
        for vmid in set().union(*self.pools.values()):
            held = sorted(name for name in names if self.allowed(user, f"/vms/{vmid}", name))
            told |= {f"/vms/{vmid}": dict.fromkeys(held, 1)} if held else {}
        return told

    monkeypatch.setattr(FakePve, "_permissions", permissions)


@pytest.fixture(autouse=True)
def vlans_have_rights_of_their_own(monkeypatch):
    """PVE::GuestHelpers, check_vnet_access: each VLAN of an interface, and the bridge where there is none."""

    def check(self, user, net):
        props = split_props(net)[1]
        path = f"/sdn/zones/{self.zones.get(props['bridge'], 'localnetwork')}/{props['bridge']}"
        vlans = [props.get("tag"), *props.get("trunks", "").split(";")]
        for each in [f"{path}/{vlan}" for vlan in vlans if vlan] or [path]:
            self.require(user, each, "SDN.Use")

    monkeypatch.setattr(FakePve, "_check_bridge", check)
    monkeypatch.setattr(FakePve, "zones", {}, raising=False)
