# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exit statuses by which systemd says that it could not even set up the process."""

from __future__ import annotations

from collections.abc import Mapping

# systemd.exec(5), "Process exit codes": number → (what failed, what to do; {…} are the unit's own).
SETUP_CODES: Mapping[int, tuple[str, str]] = {
    200: ("CHDIR", "create the working directory {directory} or correct WorkingDirectory= of {unit}"),
    201: ("NICE", "correct Nice= of {unit}, or allow it in this container"),
    202: ("FDS", "check the sockets and files that {unit} is to inherit"),
    203: ("EXEC", "make {program} exist and executable for {user} (path, mode, interpreter line, architecture)"),
    204: ("MEMORY", "free memory: {unit} could not even be set up"),
    205: ("LIMITS", "correct the Limit…= settings of {unit}, or raise the container's own limits"),
    206: ("OOM_ADJUST", "remove OOMScoreAdjust= from {unit}: this container may not set it"),
    207: ("SIGNAL_MASK", "check the signal settings of {unit}"),
    208: ("STDIN", "correct StandardInput= of {unit}"),
    209: ("STDOUT", "create the folder of {log}, or correct StandardOutput= of {unit}"),
    210: ("CHROOT", "correct RootDirectory= of {unit}"),
    211: ("IOPRIO", "remove IOScheduling…= from {unit}: this container may not set it"),
    212: ("TIMERSLACK", "remove TimerSlackNSec= from {unit}"),
    213: ("SECUREBITS", "remove SecureBits= from {unit}"),
    214: ("SETSCHEDULER", "remove CPUScheduling…= from {unit}: this container may not set it"),
    215: ("CPUAFFINITY", "correct CPUAffinity= of {unit}: it names CPUs that this container does not have"),
    216: ("GROUP", "create the group of {unit}, or correct Group="),
    217: ("USER", "create the user {user}, or correct User= of {unit}"),
    218: ("CAPABILITIES", "remove the capability settings of {unit}: this container may not set them"),
    219: ("CGROUP", "let {unit} have its control group: this container may not write it"),
    220: ("SETSID", "no session could be made for {unit}: look at the container's init"),
    221: ("CONFIRM", "correct StandardInput= of {unit}"),
    222: ("STDERR", "correct StandardError= of {unit}"),
    224: ("PAM", "correct PAMName= of {unit}"),
    225: ("NETWORK", "remove PrivateNetwork= from {unit}: this container may not set it up"),
    226: (
        "NAMESPACE",
        "a path in the sandbox settings of {unit} does not exist, or this container may not mount: drop that setting",
    ),
    227: ("NO_NEW_PRIVILEGES", "remove NoNewPrivileges= from {unit}"),
    228: ("SECCOMP", "remove SystemCallFilter= from {unit}: this kernel or container refuses it"),
    229: ("SELINUX_CONTEXT", "correct SELinuxContext= of {unit}"),
    230: ("PERSONALITY", "correct Personality= of {unit}"),
    231: ("APPARMOR_PROFILE", "correct AppArmorProfile= of {unit}"),
    232: ("ADDRESS_FAMILIES", "remove RestrictAddressFamilies= from {unit}"),
    233: ("RUNTIME_DIRECTORY", "free the place of RuntimeDirectory= of {unit}"),
    235: ("CHOWN", "check the ownership settings of {unit}"),
    236: ("SMACK_PROCESS_LABEL", "correct SmackProcessLabel= of {unit}"),
    237: ("KEYRING", "set KeyringMode=inherit in {unit}"),
    238: ("STATE_DIRECTORY", "free the place of StateDirectory= of {unit}"),
    239: ("CACHE_DIRECTORY", "free the place of CacheDirectory= of {unit}"),
    240: ("LOGS_DIRECTORY", "free the place of LogsDirectory= of {unit}"),
    241: ("CONFIGURATION_DIRECTORY", "free the place of ConfigurationDirectory= of {unit}"),
    242: ("NUMA_POLICY", "correct NUMAPolicy= of {unit}"),
    243: ("CREDENTIALS", "make the files of LoadCredential= of {unit} readable"),
    245: ("BPF", "remove RestrictFileSystems= from {unit}"),
}
