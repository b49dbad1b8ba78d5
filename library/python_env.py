#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: python_env
short_description: Have a locked Python environment, and prove that it imports
version_added: 0.1.0
author:
  - dflash.launchproof contributors (@dflash)
description:
  - Makes a virtual environment with C(uv) from a lock with hashes, imports what the jobs import, and only then puts it
    in its place. O(path) is a link to a folder beside it, so a failed change leaves the earlier environment as it was.
  - When the environment was made from the same lock, nothing is run. Whether C(import pynvml) is nvidia-ml-py's is
    proved again all the same, by the file's hash.
  - Tells whether NVML answers on the target, and why not. That is never a failure, a job without a GPU needs none.
options:
  path:
    description:
      - Where the environment is to be. A folder or link there that this module did not make is never touched.
    type: path
    required: true
  requirements:
    description:
      - The lock's text, in the form that C(uv pip compile --generate-hashes) writes. Each package pinned with C(==).
    type: str
    required: true
  extra_requirements:
    description:
      - Packages beside the lock, pinned with C(==) as well, without hashes. For builds that differ from machine to
        machine, as torch's for CPU and for CUDA do.
    type: list
    elements: str
    default: []
  imports:
    description:
      - Modules that must be importable before the environment is used. This runs as root once, which also caches their
        bytecode for users who may not write there.
    type: list
    elements: str
    default: []
  python:
    description:
      - The target's Python that the environment is based on.
    type: path
    default: /usr/bin/python3
  find_links:
    description:
      - Folders on the target, or addresses, with more wheels than the index has.
    type: list
    elements: str
    default: []
  base:
    description:
      - An environment on the target, of the same Python, whose packages can be imported as well, after those of this one.
        For images that bring a torch of their own for their GPUs.
      - The lock is then installed as it is, without what its packages depend on, which the other environment has.
    type: path
  gpus:
    description:
      - GPUs that the jobs declare, by UUID or index. When there are any, the environment's own Python imports C(pynvml) and
        has to see them; if not, nothing can be launched on them, and the module fails and says what it sees.
    type: list
    elements: str
    default: []
  environment:
    description:
      - Environment variables of C(uv) and of the download of C(uv), such as E(UV_DEFAULT_INDEX), E(SSL_CERT_FILE),
        E(HTTPS_PROXY) or E(UV_TORCH_BACKEND).
    type: dict
    default: {}
  secret_environment:
    description:
      - As O(environment), for values that must not be shown, such as an index address with a password.
    type: dict
    default: {}
  uv:
    description:
      - C(uv) on the target. When it is not given, O(uv_version) is fetched from the index, which needs neither pip
        nor anything else but O(python), and kept in C(/usr/local/lib/launchproof).
    type: path
  uv_version:
    description:
      - Version of C(uv) to fetch.
    type: str
  uv_sha256:
    description:
      - Hash of the wheel of O(uv_version) for each machine name, as C(uname -m) prints it.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Also predicts on a target that has no environment yet. NVML is not started then.
  diff_mode:
    support: full
    description: Shows the packages before and after.
  platform:
    support: full
    platforms: Linux
    description: Needs Linux on the target.
notes:
  - The environment before the present one is kept, for jobs that still run from it. Older ones are removed.
"""

EXAMPLES = r"""
- name: Have the environment of the jobs
  dflash.launchproof.python_env:
    path: /opt/launchproof/venv
    requirements: "{{ lookup('ansible.builtin.file', 'requirements.lock') }}"
    extra_requirements: [torch==2.13.0]
    imports: [torch, pynvml]
    uv: /usr/local/bin/uv
"""

RETURN = r"""
digest:
  description: What the environment is made from.
  type: str
  returned: always
packages:
  description: Name to version, as installed; in check mode, as the lock says.
  type: dict
  returned: always
seconds:
  description: How long each part took.
  type: dict
  returned: when something was done
  sample: {uv: 1.1, install: 6.2, imports: 8.0}
telemetry:
  description: Whether NVML answers on the target.
  type: dict
  returned: always
  contains:
    state:
      description: V(nvml), V(off), or V(unknown) in check mode.
      type: str
    why:
      description: Why it is not V(nvml).
      type: str
    driver:
      description: Version of the driver.
      type: str
    gpus:
      description: How many GPUs NVML sees.
      type: int
    environment:
      description: UUIDs of the GPUs that C(pynvml) sees in the environment.
      type: list
      elements: str
      returned: when O(gpus) names some, not in check mode
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import time
import zipfile
from urllib.parse import urlsplit

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dflash.launchproof.plugins.module_utils import python_env as pure
from ansible_collections.dflash.launchproof.plugins.module_utils.python_env import EnvError

LIBRARY = "/usr/local/lib/launchproof"
PYPI = "https://pypi.org/simple"


def fetch_uv(index: str, version: str, hashes: dict) -> str:
    """Path of C(uv), fetched from the index unless this version is there; the wheel must have the declared hash."""
    path = os.path.join(LIBRARY, f"uv-{version}")
    if os.access(path, os.X_OK):
        return path
    # Here, since a call that finds everything in place can do without: 0.04 s.
    import urllib.error

    from ansible.module_utils.urls import ConnectionError as UrlError
    from ansible.module_utils.urls import open_url

    machine = platform.machine()
    if machine not in hashes:
        raise EnvError(f"uv_sha256 has no hash for this machine ({machine}). Add it, or set uv to one on the target.")
    shown, headers = pure.split_credentials(index)
    page = f"{shown.rstrip('/')}/uv/"
    try:
        with open_url(page, headers=headers, timeout=60) as answer:
            address = pure.find_link(answer.read().decode(), answer.geturl(), hashes[machine])
        if address is None:
            raise EnvError(f"uv {version} for {machine} is not on the index {shown}. Set uv to one on the target.")
        same_host = urlsplit(address).netloc == urlsplit(page).netloc
        with open_url(address, headers=headers if same_host else {}, timeout=60) as answer:
            wheel = answer.read()
    except (UrlError, urllib.error.URLError, OSError, ValueError) as error:
        raise EnvError(
            f"uv could not be fetched from {shown}: {error}. Correct environment (UV_DEFAULT_INDEX, SSL_CERT_FILE, "
            "HTTPS_PROXY), or set uv to one on the target."
        ) from error
    if hashlib.sha256(wheel).hexdigest() != hashes[machine]:
        raise EnvError(f"what {shown} gave for uv {version} does not have the declared hash. Is there a wrong mirror?")
    os.makedirs(LIBRARY, mode=0o755, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive, open(temporary, "wb") as handle:
        handle.write(archive.read(f"uv-{version}.data/scripts/uv"))
    os.chmod(temporary, 0o755)
    os.replace(temporary, path)
    return path


def call(argv: list, environ: dict, what: str, stdin: str | None = None) -> str:
    """Run a command and return what it printed; its last lines are in the error."""
    try:
        done = subprocess.run(argv, env=environ, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvError(f"{what}: {argv[0]}: {error.strerror}") from error
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-20:])
        raise EnvError(f"{what}: exit {done.returncode}\n{tail}")
    return done.stdout


def seen_gpus(path: str, wanted: list) -> list:
    """UUIDs of the GPUs that the environment's own pynvml sees. Raises EnvError unless C(wanted) are among them."""
    said = json.loads(call([os.path.join(path, "bin", "python"), "-I", "-c", pure.LOOK], dict(os.environ), "pynvml"))
    problem = pure.unseen(said, wanted)
    if problem:
        raise EnvError(
            f"jobs declare GPUs {', '.join(wanted)}, and the environment {path} cannot be used for them: {problem}. "
            "Correct the jobs' gpus, or give the target its devices and driver libraries."
        )
    return said["gpus"]


def build(params: dict, digest: str, environ: dict) -> tuple:
    """Make and prove a new environment beside the path; its folder and the seconds of each part."""
    seconds = {}
    began = time.monotonic()

    def lap(part: str) -> None:
        nonlocal began
        seconds[part], began = round(time.monotonic() - began, 2), time.monotonic()

    uv = params["uv"]
    if not uv:
        uv = fetch_uv(environ.get("UV_DEFAULT_INDEX", PYPI), params["uv_version"], params["uv_sha256"])
    lap("uv")
    number = 1
    while os.path.lexists(f"{params['path']}-{digest[:12]}-{number}"):
        number += 1
    folder = f"{params['path']}-{digest[:12]}-{number}"
    os.makedirs(os.path.dirname(folder), mode=0o755, exist_ok=True)
    try:
        call([uv, "venv", "--quiet", "--no-python-downloads", "--python", params["python"], folder], environ, "uv venv")
        python = os.path.join(folder, "bin", "python")
        install = [uv, "pip", "install", "--quiet", "--python", python, "-r", "-", *params["extra_requirements"]]
        for place in params["find_links"]:
            install += ["--find-links", place]
        if params["base"]:
            pure.link_base(folder, params["base"])
            install.append("--no-deps")
        call(install, environ, "uv pip install", stdin=params["requirements"])
        lap("install")
        problem = pure.pynvml_problem(folder)
        if problem and "nvidia-ml-py" in pure.locked(params["requirements"], params["extra_requirements"]):
            raise EnvError(f"{problem}. Take the other package out of the lock.")
        if params["imports"]:
            offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
            call(
                [python, "-I", "-c", f"import {', '.join(params['imports'])}"], offline, "import in the new environment"
            )
        lap("imports")
        with open(os.path.join(folder, pure.MARKER), "w", encoding="utf-8") as handle:
            json.dump({"schema": pure.SCHEMA, "digest": digest}, handle)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, seconds


def switch(path: str, folder: str, previous: str | None) -> None:
    """Point C(path) at C(folder), and remove what is neither that nor the one before."""
    temporary = f"{path}.{os.getpid()}.tmp"
    os.symlink(os.path.basename(folder), temporary)
    os.replace(temporary, path)
    parent, name = os.path.split(path)
    for entry in os.listdir(parent):
        candidate = os.path.join(parent, entry)
        marked = os.path.exists(os.path.join(candidate, pure.MARKER))
        if entry.startswith(name + "-") and marked and candidate not in (folder, previous):
            shutil.rmtree(candidate)


def lines(packages: dict) -> str:
    """Packages as a diff shows them."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def run(module: AnsibleModule) -> dict:
    """Compare, and make the environment when it is not the declared one; the module's result."""
    params = module.params
    path = params["path"] = os.path.abspath(params["path"])
    errors = pure.declaration_errors(params)
    if errors:
        raise EnvError("\n".join(errors))
    wanted = pure.locked(params["requirements"], params["extra_requirements"])
    digest = pure.digest(
        params["requirements"], params["extra_requirements"], os.path.realpath(params["python"]), params["base"]
    )
    found = pure.look(path)
    if found.kind == "foreign":
        raise EnvError(
            f"path {path} exists and is not an environment of this module. Move it away or choose another path."
        )
    before = pure.distributions(found.target) if found.target else {}
    problem = found.problem or (found.target and "nvidia-ml-py" in wanted and pure.pynvml_problem(found.target)) or None
    changed = found.digest != digest or problem is not None
    result = {
        "changed": changed,
        "digest": digest,
        "packages": before,
        "telemetry": pure.nvml(initialise=not module.check_mode),
    }
    if problem:
        result["problem"] = problem
    if changed and not module.check_mode:
        environ = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        for variables in (params["environment"], params["secret_environment"]):
            environ.update({name: str(value) for name, value in variables.items()})
        # The download of uv looks at the same variables, in this process.
        os.environ.update(environ)
        if not os.access(params["python"], os.X_OK):
            raise EnvError(f"python {params['python']} is not there or not executable. Install it or set another one.")
        folder, result["seconds"] = build(params, digest, environ)
        switch(path, folder, found.target)
        result["packages"] = pure.distributions(folder)
    elif changed:
        result["packages"] = wanted
    if params["gpus"] and not module.check_mode:
        result["telemetry"]["environment"] = seen_gpus(path, params["gpus"])
    if changed:
        # What the lock left open (a local version such as 2.13.0+cpu) is no change of a package.
        result["diff"] = {
            "before_header": path,
            "after_header": path,
            "before": lines(before),
            "after": lines(result["packages"]),
        }
    return result


def main() -> None:
    """Module entry point."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "requirements": {"type": "str", "required": True},
            "extra_requirements": {"type": "list", "elements": "str", "default": []},
            "imports": {"type": "list", "elements": "str", "default": []},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "base": {"type": "path"},
            "gpus": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "secret_environment": {"type": "dict", "default": {}, "no_log": True},
            "uv": {"type": "path"},
            "uv_version": {"type": "str"},
            "uv_sha256": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except EnvError as error:
        module.fail_json(msg=str(error))
    with contextlib.suppress(KeyError):
        result["seconds"]["total"] = round(sum(result["seconds"].values()), 2)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
