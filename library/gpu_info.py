#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: The NVIDIA driver, GPUs and device nodes of a machine
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Asks NVML, the driver's own library, and looks at C(/dev). Needs Python's standard library alone.
  - A machine without a driver or GPU is no failure, but RV(why).
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode. The driver itself makes nodes that are missing when root asks NVML, as it does for C(nvidia-smi).
  diff_mode:
    support: none
    description: There is nothing to compare.
options: {}
seealso:
  - module: dflash.launchproof.pve_container
"""

EXAMPLES = r"""
- name: Know the GPUs of the node
  dflash.launchproof.gpu_info:
  register: found
"""

RETURN = r"""
driver:
  description: Version of the driver, null without one.
  returned: success
  type: str
  sample: 580.159.04
why:
  description: Why no GPU is found; null where one is.
  returned: success
  type: str
gpus:
  description: The GPUs in NVML's order. C(minor) is the number of C(/dev/nvidiaN).
  returned: success
  type: list
  elements: dict
  sample:
    - {index: 0, uuid: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f, minor: 0}
nodes:
  description: Device nodes of the driver that are there, with their modes.
  returned: success
  type: dict
  sample: {/dev/nvidia0: "0666", /dev/nvidiactl: "0666"}
missing:
  description: Device nodes that CUDA needs and that are not there.
  returned: success
  type: list
  elements: str
  sample: [/dev/nvidia-uvm, /dev/nvidia-uvm-tools]
nvidia_modprobe:
  description: Path of the driver's own program that makes them, null where it is not installed.
  returned: success
  type: str
  sample: /usr/bin/nvidia-modprobe
"""

import os
import shutil
import stat
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dflash.launchproof.plugins.module_utils.gpus import CAPABILITIES, CONTROL
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.nvml import Nvml

PROGRAMS = "/usr/bin:/usr/sbin:/usr/local/bin:/usr/local/sbin"


def mode(path: str) -> str | None:
    """Octal access mode of a character device, None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{stat.S_IMODE(status.st_mode):04o}" if stat.S_ISCHR(status.st_mode) else None


def look() -> dict:
    """What the module returns."""
    nvml = Nvml()
    # A GPU that is split into MIG instances is listed as these.
    gpus = {device.parent or uuid: device for uuid, device in nvml.devices.items() if device.minor is not None}
    needed = [*CONTROL, *(f"/dev/nvidia{device.minor}" for device in gpus.values())]
    modes = {path: mode(path) for path in [*needed, *map(str, sorted(Path(CAPABILITIES).glob("*")))]}
    return {
        "driver": nvml.driver,
        "why": nvml.error or (None if gpus else "; ".join(nvml.problems) or "NVML sees no GPU"),
        "gpus": [{"index": gpu.index, "uuid": uuid, "minor": gpu.minor} for uuid, gpu in gpus.items()],
        "nodes": {path: found for path, found in modes.items() if found},
        "missing": [path for path in needed if not modes[path]],
        "nvidia_modprobe": shutil.which("nvidia-modprobe", path=PROGRAMS),
    }


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, **look())


if __name__ == "__main__":
    main()
