# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a container needs to reach the package registries as its machine does, read from the machine's own settings.

Pure functions over a root folder and an environment, so that tests can give them any machine.
"""

from __future__ import annotations

import configparser
import ipaddress
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Where Debian's update-ca-certificates takes a machine's own authorities from, and what it makes of them.
OWN_AUTHORITIES = "usr/local/share/ca-certificates"
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PROXY_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "all_proxy",
)
# pip's list-valued options; a later source replaces an earlier one as a whole.
LISTS = ("extra-index-url", "find-links", "constraint", "trusted-host")
OPTIONS = ("index-url", "no-index", *LISTS)
# The userinfo of a URL, or of a proxy without a scheme, anywhere in a value; one with a blank or slash must escape it.
USERINFO = re.compile(r"(?:^|\s|://)[^/\s]*@")


def pip_settings(root, environment, home="/root"):
    """pip's index settings on the machine: {option: text or [text]} from its files and the environment.

    Order and names as in pip's documentation (Configuration): global, user, PIP_CONFIG_FILE, environment.
    """
    root = Path(root)
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", f"{home}/.pip/pip.conf", f"{home}/.config/pip/pip.conf"]
    if environment.get("PIP_CONFIG_FILE"):
        files.append(environment["PIP_CONFIG_FILE"])
    found = {}
    for name in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string((root / name.lstrip("/")).read_text())
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update((key.replace("_", "-"), value) for key, value in parser.items(section))
    for option in OPTIONS:
        value = environment.get("PIP_" + option.upper().replace("-", "_"))
        if value:
            found[option] = value
    return {
        option: found[option].split() if option in LISTS else found[option].strip()
        for option in OPTIONS
        if found.get(option)
    }


def local_path(location):
    """The path that an index or link location on this machine's disk names, or None for one on the network."""
    if location.startswith("file:"):
        return unquote(urlsplit(location).path)
    return location if location.startswith("/") else None


def container_needs(root, environment, home="/root"):
    """What to give a container so that pip and uv in it find packages as pip on the machine does.

    Returns {"environment": {variable: value}, "secret_environment": the same of values with a user or password in them,
    "find_links": [folder], "mounts": [folder or file], "authorities": [PEM file]}. A folder is bind-mounted read-only at
    the same path, so that every setting that names it holds in the container too.
    """
    root = Path(root)
    pip = pip_settings(root, environment, home)
    out = {}
    local = []
    for option in ("index-url", "extra-index-url", "find-links", "constraint"):
        values = pip.get(option, [])
        for value in [values] if isinstance(values, str) else values:
            path = local_path(value)
            if path and (root / path.lstrip("/")).exists():
                local.append(path)
    if pip.get("index-url"):
        out["PIP_INDEX_URL"] = out["UV_DEFAULT_INDEX"] = pip["index-url"]
    if pip.get("extra-index-url"):
        out["PIP_EXTRA_INDEX_URL"] = out["UV_INDEX"] = " ".join(pip["extra-index-url"])
        # pip takes the best version from all indexes; uv's default stops at the first index that knows the name.
        out["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if pip.get("find-links"):
        out["PIP_FIND_LINKS"] = " ".join(pip["find-links"])
        out["UV_FIND_LINKS"] = ",".join(pip["find-links"])
    if pip.get("constraint"):
        out["PIP_CONSTRAINT"] = out["UV_CONSTRAINT"] = " ".join(pip["constraint"])
    if pip.get("no-index"):
        out["PIP_NO_INDEX"] = out["UV_NO_INDEX"] = pip["no-index"]
    if pip.get("trusted-host"):
        out["PIP_TRUSTED_HOST"] = " ".join(pip["trusted-host"])
    out.update((name, environment[name]) for name in PROXY_VARIABLES if environment.get(name))
    authorities = sorted(str(Path("/", path.relative_to(root))) for path in (root / OWN_AUTHORITIES).glob("**/*.crt"))
    if authorities:
        # uv and pip bring authorities of their own; the container's bundle has the machine's as well.
        out.update(dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), BUNDLE))
    return {
        "environment": {name: value for name, value in sorted(out.items()) if not USERINFO.search(value)},
        "secret_environment": {name: value for name, value in sorted(out.items()) if USERINFO.search(value)},
        "find_links": [path for path in map(local_path, pip.get("find-links", [])) if path],
        "mounts": _outermost(_mountable(root, local)),
        "authorities": authorities,
    }


def _mountable(root, paths):
    # A simple index links to files beside it (../../files/…): its parent folder is what it needs.
    for path in paths:
        target = Path(path)
        if (root / path.lstrip("/")).is_dir() and target.name == "simple" or not (root / path.lstrip("/")).is_dir():
            target = target.parent
        if target != Path("/"):
            yield str(target)


def _outermost(paths):
    kept = []
    for path in sorted(set(paths)):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept


def index_hosts(root, environment, home="/root"):
    """The names or addresses of the machine's package indexes and proxies that are on the network."""
    pip = pip_settings(root, environment, home)
    urls = [pip.get("index-url", ""), *pip.get("extra-index-url", []), *pip.get("find-links", [])]
    urls += [environment.get(name, "") for name in PROXY_VARIABLES if "no_proxy" not in name.lower()]
    return sorted({urlsplit(url).hostname for url in urls if "://" in url and urlsplit(url).hostname})


def resolvers(root):
    """(name servers, search domain) that a container can use, from the machine's resolv.conf.

    A resolver on the machine's loopback cannot be reached from a container: then systemd-resolved's list of the real ones.
    """
    for name in ("etc/resolv.conf", "run/systemd/resolve/resolv.conf"):
        try:
            text = (Path(root) / name).read_text()
        except OSError:
            continue
        servers = re.findall(r"^nameserver\s+(\S+)", text, re.M)
        servers = [server for server in servers if not _loopback(server)]
        if servers:
            search = re.search(r"^(?:search|domain)\s+(\S+)", text, re.M)
            return servers, search[1] if search else ""
    return [], ""


def _loopback(address):
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return True


def apt_options(dump):
    """How the machine reaches its mirrors, as lines of an apt.conf: proxies, authorities, leniency towards old release files.

    dump: what apt-config dump printed.
    """
    wanted = re.compile(r"Acquire::(\S+::)?(Proxy|CaInfo|Check-Valid-Until|Check-Date)\b")
    return "".join(f"{line}\n" for line in dump.splitlines() if wanted.match(line) and '""' not in line)


def apt_sources(root, suite):
    """The machine's apt source files that hold nothing but this Debian suite and its updates, for mmdebstrap."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}-backports"}
    folder = Path(root) / "etc/apt"
    out = []
    for path in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        try:
            text = path.read_text()
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if path.suffix == ".sources":
            suites = {word for line in lines if line.lower().startswith("suites:") for word in line.split()[1:]}
        elif path.suffix == ".list" or path.name == "sources.list":
            suites = {_one_line_suite(line) for line in lines}
        else:
            continue
        if suites and suites <= wanted:
            out.append(str(path))
    return out


def _one_line_suite(line):
    words = re.sub(r"\[[^\]]*\]", "", line).split()
    return words[2] if len(words) > 2 else ""
