# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What module python_env knows about locks, indexes, environments on disk and NVML; changes nothing by itself."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.nvml import Nvml

MARKER = ".launchproof.json"
# Part of the digest: raise it when an environment that an older version of this module made has to be made again.
SCHEMA = 1
# They provide the same `import pynvml` as nvidia-ml-py and overwrite its file.
IMPOSTORS = ("pynvml", "nvidia-ml-py3")


class EnvError(Exception):
    """A sentence for the user: what is wrong, where, and what to do."""


def normalize(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pinned(lines: list) -> dict:
    """Name to version of the requirements. Raises EnvError for one that is not pinned: the environment would depend on the day."""
    found = {}
    for line in lines:
        text = str(line).partition(" #")[0].partition(" --hash=")[0].partition(";")[0].strip()
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*==\s*([A-Za-z0-9.+!_-]+)", text)
        if not match:
            raise EnvError(
                f"requirement {text!r} is not pinned. Write NAME==VERSION; uv pip compile makes such a lock."
            )
        found[normalize(match[1])] = match[2]
    return found


def _lines(requirements: str) -> list:
    """A lock's lines, those that are continued put together."""
    return re.sub(r"\\\n", " ", requirements).splitlines()


def locked(requirements: str, extra: list) -> dict:
    """Name to version of every requirement in the lock's text and in the list C(extra), in order of the names. Raises EnvError."""
    return dict(sorted(_pinned([*_lines(requirements), *extra]).items()))


def declaration_errors(params: dict) -> list:
    """What is wrong with the module's parameters by themselves: a sentence each, which begins with the parameter's name."""
    errors = []
    found = {}
    for name, lines in (
        ("requirements", _lines(params["requirements"])),
        ("extra_requirements", params["extra_requirements"]),
    ):
        try:
            found |= _pinned(lines)
        except EnvError as error:
            errors.append(f"{name}: {error}")
    if not found and not errors:
        errors.append("requirements names no package. Give a lock that uv pip compile made.")
    wrong = [name for name in params["imports"] if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", str(name))]
    if wrong:
        errors.append(f"imports has {', '.join(map(repr, wrong))}. Give names of modules.")
    if not params["uv"] and not (params["uv_version"] and params["uv_sha256"]):
        errors.append("uv is not given, nor uv_version with uv_sha256. Set one of them.")
    return errors


def digest(requirements: str, extra: list, python: str, base: str | None) -> str:
    """What an environment is made from, as 64 hexadecimal digits; C(python) is the interpreter's real path."""
    data = json.dumps([SCHEMA, requirements, list(extra), python, *([base] if base else [])])
    return hashlib.sha256(data.encode()).hexdigest()


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def find_link(page: str, base: str, sha256: str) -> str | None:
    """The absolute address, without fragment, of the file with this hash on a simple index page (PEP 503); or None."""
    parser = _Links()
    parser.feed(page)
    for link in parser.links:
        address, _hash, fragment = urljoin(base, link).partition("#")
        if fragment == "sha256=" + sha256:
            return address
    return None


def split_credentials(url: str) -> tuple:
    """The address as a message may show it, and the headers that stand for its user and password."""
    parts = urlsplit(url)
    user, _at, host = parts.netloc.rpartition("@")
    headers = {"Authorization": "Basic " + base64.b64encode(unquote(user).encode()).decode()} if user else {}
    return parts._replace(netloc=host).geturl(), headers


def site_packages(environment: str) -> str | None:
    """The folder of an environment's packages, None when there is none."""
    lib = os.path.join(environment, "lib")
    try:
        names = sorted(name for name in os.listdir(lib) if name.startswith("python"))
    except OSError:
        return None
    return os.path.join(lib, names[0], "site-packages") if names else None


def distributions(environment: str) -> dict:
    """Name to version of what is installed in the environment, read from the folders without starting its Python."""
    site = site_packages(environment)
    found = {}
    for entry in sorted(os.listdir(site)) if site and os.path.isdir(site) else ():
        if entry.endswith(".dist-info"):
            name, _dash, version = entry[: -len(".dist-info")].partition("-")
            found[normalize(name)] = version
    return found


def pynvml_problem(environment: str) -> str | None:
    """Why C(import pynvml) there would not be nvidia-ml-py's, or None.

    The proof is the hash of pynvml.py in nvidia-ml-py's RECORD: another distribution that overwrote the file, or a
    leftover of one, does not have it.
    """
    installed = distributions(environment)
    present = [name for name in IMPOSTORS if name in installed]
    if present:
        return f"{' and '.join(present)} is installed and overwrites nvidia-ml-py's pynvml"
    if "nvidia-ml-py" not in installed:
        return "nvidia-ml-py is not installed"
    site = site_packages(environment)
    record = os.path.join(site, f"nvidia_ml_py-{installed['nvidia-ml-py']}.dist-info", "RECORD")
    try:
        with open(record, encoding="utf-8", newline="") as handle:
            hashes = {row[0]: row[1] for row in csv.reader(handle) if len(row) >= 2}
        with open(os.path.join(site, "pynvml.py"), "rb") as handle:
            actual = base64.urlsafe_b64encode(hashlib.sha256(handle.read()).digest()).rstrip(b"=").decode()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if hashes.get("pynvml.py") != "sha256=" + actual:
        return "pynvml.py is not the file that nvidia-ml-py installed"
    return None


@dataclass(frozen=True)
class Found:
    """What lies at the environment's path: C(kind) is absent, ours or foreign."""

    kind: str
    target: str | None = None
    digest: str | None = None
    problem: str | None = None


def look(path: str) -> Found:
    """Read what is at C(path). Ours is a link to a folder PATH-… with our marker in it."""
    if not os.path.lexists(path):
        return Found("absent")
    if not os.path.islink(path):
        return Found("foreign")
    target = os.path.join(os.path.dirname(path), os.readlink(path))
    if not target.startswith(path + "-"):
        return Found("foreign")
    try:
        with open(os.path.join(target, MARKER), encoding="utf-8") as handle:
            made = json.load(handle)["digest"]
    except FileNotFoundError:
        return Found("ours", target, None, "its folder is gone or was never finished")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Found("ours", target, None, f"its marker cannot be read ({error})")
    if not os.access(os.path.join(target, "bin", "python"), os.X_OK):
        return Found("ours", target, made, "its interpreter is gone")
    return Found("ours", target, made, None)


def link_base(environment: str, base: str) -> None:
    """Make the packages of another environment importable here, after those installed here. Raises EnvError."""
    site, other = site_packages(environment), site_packages(base)
    version = os.path.basename(os.path.dirname(site))
    if other is None or os.path.basename(os.path.dirname(other)) != version:
        raise EnvError(f"base {base} has no lib/{version}/site-packages. Name an environment of the same Python.")
    with open(os.path.join(site, "launchproof_base.pth"), "w", encoding="utf-8") as handle:
        handle.write(other + "\n")


def nvml(initialise: bool) -> dict:
    """Whether NVML answers here: C(state) nvml or off, C(why) it is off, driver and number of GPUs.

    Without C(initialise) nothing is asked: as root, in a privileged container, NVML's start creates device nodes that are
    missing.
    """
    if not initialise:
        return {"state": "unknown", "why": "NVML is not started in check mode", "driver": None, "gpus": 0}
    library = Nvml()
    library.close()
    count = len(library.devices)
    why = None if count else "; ".join(library.problems) or "NVML sees no GPU"
    if library.driver is None:
        why = library.error
    return {"state": "off" if why else "nvml", "why": why, "driver": library.driver, "gpus": count}


# What the environment's own Python says of its pynvml, as JSON. It must not need anything else of the collection.
LOOK = """
import json
try:
    import pynvml
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    said = {"gpus": [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]}
except Exception as error:
    said = {"error": "%s: %s" % (type(error).__name__, error)}
print(json.dumps(said))
"""


def unseen(said: dict, wanted: list) -> str | None:
    """What is wrong when C(wanted), UUIDs or indexes, are to be seen by what C(LOOK) said; None when all are."""
    if "error" in said:
        return f"its pynvml does not work ({said['error']})"
    missing = [
        gpu
        for gpu in wanted
        if not (gpu.isdecimal() and int(gpu) < len(said["gpus"]))
        and not any(uuid.startswith(gpu) for uuid in said["gpus"])
    ]
    have = ", ".join(said["gpus"]) or "none"
    return f"its pynvml does not see {', '.join(missing)}; it sees {have}" if missing else None
