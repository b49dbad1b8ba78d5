# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What containers need of their machine, from machines of many kinds."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.node import machine


@pytest.fixture
def host(tmp_path):
    class Host:
        path = tmp_path

        def write(self, name, text=""):
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    return Host()


def test_a_plain_machine_needs_nothing(host):
    assert machine.container_needs(host.path, {}) == {
        "environment": {},
        "secret_environment": {},
        "find_links": [],
        "mounts": [],
        "authorities": [],
    }


def test_local_folders_are_mounted_where_the_settings_name_them(host):
    host.write("srv/index/simple/x/index.html")
    host.write("srv/wheels/torch.whl")
    host.write("etc/limits/constraints.txt", "torch<3\n")
    host.write(
        "etc/pip.conf",
        "[global]\nextra-index-url = file:///srv/index/simple\n    https://index.example.org/simple\nfind-links = /srv/wheels\n",
    )
    host.write("etc/xdg/pip/pip.conf", "[global]\nconstraint = /etc/limits/constraints.txt\n")
    needs = machine.container_needs(host.path, {"HTTPS_PROXY": "http://proxy.example.org:3128"})
    assert needs["mounts"] == ["/etc/limits", "/srv/index", "/srv/wheels"]
    assert needs["find_links"] == ["/srv/wheels"]
    assert needs["environment"] == {
        "HTTPS_PROXY": "http://proxy.example.org:3128",
        "PIP_CONSTRAINT": "/etc/limits/constraints.txt",
        "PIP_EXTRA_INDEX_URL": "file:///srv/index/simple https://index.example.org/simple",
        "PIP_FIND_LINKS": "/srv/wheels",
        "UV_CONSTRAINT": "/etc/limits/constraints.txt",
        "UV_FIND_LINKS": "/srv/wheels",
        "UV_INDEX": "file:///srv/index/simple https://index.example.org/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_the_environment_wins_over_files_and_user_over_global(host):
    host.write("etc/pip.conf", "[global]\nindex-url = https://one.example.org\nfind-links = /a\n")
    host.write("root/.config/pip/pip.conf", "[install]\nindex_url = https://two.example.org\n")
    assert machine.pip_settings(host.path, {}) == {"index-url": "https://two.example.org", "find-links": ["/a"]}
    assert (
        machine.pip_settings(host.path, {"PIP_INDEX_URL": "https://three.example.org"})["index-url"]
        == "https://three.example.org"
    )


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        ("PIP_INDEX_URL", "https://user:pw@index.example.org/simple", {"PIP_INDEX_URL", "UV_DEFAULT_INDEX"}),
        ("PIP_EXTRA_INDEX_URL", "https://a.example.org/x https://token@b.example.org/", {"PIP_EXTRA_INDEX_URL", "UV_INDEX"}),
        ("PIP_FIND_LINKS", "/srv/wheels https://user:pw@c.example.org/", {"PIP_FIND_LINKS", "UV_FIND_LINKS"}),
        ("HTTPS_PROXY", "user:pw@proxy.example.org:3128", {"HTTPS_PROXY"}),
    ],
)  # fmt: skip
def test_settings_with_a_user_or_password_are_kept_apart(host, variable, value, names):
    needs = machine.container_needs(host.path, {variable: value, "no_proxy": "localhost"})
    assert set(needs["secret_environment"]) == names
    assert not names & set(needs["environment"])
    assert needs["environment"]["no_proxy"] == "localhost"


def test_an_at_sign_in_a_path_is_no_password(host):
    value = "https://index.example.org/@team/simple file:///srv/a@b"
    assert machine.container_needs(host.path, {"PIP_EXTRA_INDEX_URL": value})["secret_environment"] == {}


def test_what_apt_needs_to_reach_its_mirrors_is_kept_and_nothing_else():
    dump = 'Acquire "";\nAcquire::http::Proxy "http://u:pw@proxy:3128/";\nAcquire::https::Proxy "";\nAcquire::Languages "en";\n'
    dump += 'Acquire::Check-Date "false";\n'
    assert (
        machine.apt_options(dump) == 'Acquire::http::Proxy "http://u:pw@proxy:3128/";\nAcquire::Check-Date "false";\n'
    )


def test_a_folder_that_is_not_there_is_not_mounted(host):
    assert machine.container_needs(host.path, {"PIP_FIND_LINKS": "/gone"})["mounts"] == []


def test_a_broken_pip_configuration_is_pips_to_complain_about(host):
    host.write("etc/pip.conf", "no section\n")
    assert machine.pip_settings(host.path, {}) == {}


def test_own_authorities_switch_every_client_to_the_bundle(host):
    host.write("usr/local/share/ca-certificates/proxy/one.crt")
    needs = machine.container_needs(host.path, {})
    assert needs["authorities"] == ["/usr/local/share/ca-certificates/proxy/one.crt"]
    assert set(needs["environment"].values()) == {"/etc/ssl/certs/ca-certificates.crt"}


def test_hosts_that_must_not_be_in_the_containers_network(host):
    environment = {
        "PIP_INDEX_URL": "https://user:pw@index.example.org:8443/simple",
        "HTTPS_PROXY": "http://192.0.2.7:3128",
        "NO_PROXY": "http://no.example.org",
    }
    assert machine.index_hosts(host.path, environment) == ["192.0.2.7", "index.example.org"]


@pytest.mark.parametrize(
    ("text", "resolved", "found"),
    [
        ("nameserver 192.0.2.1\nsearch example.org x\n", "", (["192.0.2.1"], "example.org")),
        ("nameserver 127.0.0.53\n", "nameserver 192.0.2.2\n", (["192.0.2.2"], "")),
        ("nameserver 127.0.0.1\nnameserver 192.0.2.3\n", "", (["192.0.2.3"], "")),
        ("nameserver ::1\n", "", ([], "")),
        ("", "", ([], "")),
    ],
)
def test_a_resolver_on_loopback_is_no_use_to_a_container(host, text, resolved, found):
    host.write("etc/resolv.conf", text)
    host.write("run/systemd/resolve/resolv.conf", resolved)
    assert machine.resolvers(host.path) == found


def test_only_apt_sources_of_the_suite_alone(host):
    host.write("etc/apt/sources.list", "# deb http://x y z\n")
    host.write(
        "etc/apt/sources.list.d/debian.sources",
        "Types: deb\nURIs: http://a\nSuites: bookworm bookworm-updates\n\nSuites: bookworm-security\n",
    )
    host.write("etc/apt/sources.list.d/other.sources", "Suites: nodistro\n")
    host.write("etc/apt/sources.list.d/cloud.list", "deb http://b cloud-bookworm main\n")
    host.write("etc/apt/sources.list.d/own.list", "deb [signed-by=/k arch=amd64] http://b bookworm main\n")
    host.write("etc/apt/sources.list.d/old.list.save", "deb http://b bookworm main\n")
    folder = f"{host.path}/etc/apt/sources.list.d"
    assert machine.apt_sources(host.path, "bookworm") == [f"{folder}/debian.sources", f"{folder}/own.list"]
