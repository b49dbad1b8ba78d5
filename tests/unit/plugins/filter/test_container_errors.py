# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host and the declaration of its container do not come apart, and a container has one host."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.filter.container_errors import container_errors


def host(vmid, cluster="pve1", **more):
    return {"pve_api_host": cluster, "launchproof_container": {"vmid": vmid}, "ansible_pct_vmid": vmid, **more}


def errors(**hostvars):
    return container_errors(hostvars["a"]["launchproof_container"]["vmid"], "a", list(hostvars), hostvars)


def test_hosts_that_are_derived_have_none():
    rented = {"ansible_host": "203.0.113.7"}
    assert errors(a=host(200), b=host(201), elsewhere=host(200, cluster="pve9"), rented=rented) == []
    assert errors(a=host("200", ansible_pct_vmid=200)) == []
    # A container that is an ssh host of its own.
    assert errors(a={"launchproof_container": {"vmid": 200}}) == []


def test_another_number_is_named_with_the_way_to_derive_it():
    (error,) = errors(a=host(200, ansible_pct_vmid=201))
    assert error.startswith("ansible_pct_vmid is 201: ")
    assert "launchproof_container.vmid 200" in error
    assert "ansible_pct_vmid: '{{ launchproof_container.vmid }}'" in error


def test_a_second_host_of_the_same_container_is_named():
    (error,) = errors(a=host(200), b=host("200"), c=host(201))
    assert error.startswith(
        "launchproof_container.vmid is 200: host b declares that container too (pve_api_host is pve1)"
    )
