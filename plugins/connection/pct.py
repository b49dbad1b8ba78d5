# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: pct
short_description: Run tasks in a Proxmox LXC container through its node
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Runs tasks in an LXC container from the node it lives on, which is reached over ssh or is this machine. The
    container needs no ssh server, no address and no Python for it.
  - One remote execution a task. What C(pct exec) checks for half a second before each command is one look at the
    container's state in the same execution.
  - Tells apart whether the node cannot be reached, the container is missing, stopped or frozen, the connection was
    cut, or the command failed or was killed. All but the last two make the host unreachable, so that
    M(ansible.builtin.wait_for_connection) waits for a container that starts late.
extends_documentation_fragment:
  - ansible.builtin.connection_pipelining
  - dflash.launchproof.ssh_options
options:
  vmid:
    description: Number of the container.
    type: int
    required: true
    vars:
      - name: ansible_pct_vmid
  host:
    description: Name or address of the Proxmox node. Not used with O(pct_transport=local).
  remote_user:
    description:
      - User on the node, which must be root there. Inside, every task starts as root; C(become) leads to others.
  pct_transport:
    description: How the node is reached.
    type: str
    default: ssh
    choices:
      ssh: Over ssh, as C(ansible.builtin.ssh) would.
      local: Not at all, this machine is the node.
    vars:
      - name: ansible_pct_transport
  method:
    description: What runs a command inside.
    type: str
    default: lxc-attach
    choices:
      lxc-attach: C(lxc-attach), the program that C(pct exec) itself ends up in.
      pct: C(pct exec), half a second slower each time.
    vars:
      - name: ansible_pct_method
  lxc_path:
    description: Folder in which LXC keeps its containers on the node; LXC's own default if not given.
    type: str
    vars:
      - name: ansible_pct_lxc_path
  pipelining:
    default: true
  reconnection_retries:
    description:
      - How often a connection that failed is tried again.
      - Only what may pass is tried again, such as a node that turns connections away because too many are made at
        once. A refused port or a wrong key is told at once, and a command that had begun in the container is never
        repeated.
    default: 5
notes:
  - Containers of one node share ssh connections to it, eight sessions on each and no more connections than that takes,
    since sshd allows ten sessions on one (C(MaxSessions)) and refuses connections that are made all at once
    (C(MaxStartups)). The first is the one that P(ansible.builtin.ssh#connection) uses for the node. This needs
    C(ControlMaster=auto) and C(ControlPersist), as O(ssh_args) has by default, and neither O(control_path) nor a
    C(ControlPath) in the arguments.
  - Files travel through the same execution as a stream, are checked by length, and replace their target in one rename.
  - With a password for the node instead of a key, files need these shared connections.
  - A command is one argument on its way and thus limited to 128 KiB. Pipelined modules travel on standard input and
    are not.
  - The environment of the node does not reach the container. There it is PATH, HOME of root, LANG C.UTF-8.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_text
from ansible.plugins.connection.ssh import AnsibleControlPersistBrokenPipeError
from ansible.plugins.connection.ssh import Connection as SshConnection
from ansible.utils.display import Display
from ansible.utils.path import makedirs_safe, unfrackpath
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import attach

display = Display()

# Of the ten that sshd allows on one connection, unless its MaxSessions says otherwise: plain ssh and pvesh come as well.
SESSIONS = 8
# Byte of the file of places that is locked while connection 0 is made; those of the places themselves lie below.
OPENING = 1 << 20


class Connection(SshConnection):
    """Commands in a container, wrapped for its node and carried by the parent's ssh machinery."""

    transport = "dflash.launchproof.pct"
    has_pipelining = True
    _shared = 0  # which of the shared connections to the node the next execution takes

    def exec_command(self, cmd, in_data=None, sudoable=True):
        """Run ``cmd`` in the container: (exit code, stdout, stderr), as every connection plugin does."""
        become_asks = bool(sudoable and self.become and self.become.expect_prompt())

        def run(command):
            if self.get_option("pct_transport") == "local" and not become_asks:
                # The parent writes all of stdin before it reads; that ssh buffers both ways saves it, here nothing does.
                return self._stream(command, data=in_data or b"")
            return self._bare_run(command, in_data, sudoable=sudoable, checkrc=False)

        outcome = self._attach(cmd, stdin=bool(in_data) or become_asks, run=run)
        killed = attach.killed_by(outcome.rc)
        note = f"{self._name()}: {killed}\n" if killed else ""
        return outcome.rc, outcome.stdout, outcome.stderr + to_bytes(note)

    def put_file(self, in_path, out_path):
        """Copy a file of any size into the container; the target is replaced in one rename, once it is complete."""
        source = Path(to_text(in_path))
        if not source.is_file():
            raise AnsibleFileNotFound(f"{in_path} is not a file on this machine")
        size, mode = source.stat().st_size, stat.S_IMODE(source.stat().st_mode)
        display.vvv(f"PUT {in_path} TO {out_path}", host=self._name())

        def run(command):
            with source.open("rb") as stream:
                return self._stream(command, stdin=stream)

        outcome = self._attach(attach.receive(to_text(out_path), size, mode), stdin=True, run=run)
        if outcome.rc != 0:
            raise AnsibleError(f"{self._name()}: {in_path} was not copied to {out_path}: {outcome.words()}")

    def fetch_file(self, in_path, out_path):
        """Copy a file of any size out of the container; the local target is replaced once it is complete."""
        target = Path(to_text(out_path))
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        display.vvv(f"FETCH {in_path} TO {out_path}", host=self._name())

        def run(command):
            with partial.open("wb") as stream:
                return self._stream(command, target=stream)

        try:
            outcome = self._attach(attach.send(to_text(in_path)), stdin=False, run=run)
            if outcome.rc == attach.NO_SUCH_FILE:
                raise AnsibleFileNotFound(f"{self._name()}: {in_path} is not a file in the container")
            if outcome.rc != 0:
                raise AnsibleError(f"{self._name()}: {in_path} was not fetched: {outcome.words()}")
            partial.replace(target)
        except OSError as error:
            raise AnsibleError(
                f"{self._name()}: {in_path} was not fetched, {out_path} cannot be written: {error}"
            ) from error
        finally:
            partial.unlink(missing_ok=True)

    def reset(self):
        """Drop the shared ssh connections to the node, if there are any; what runs over them goes on."""
        if self.get_option("pct_transport") == "local":
            return
        self._shared = 0
        super().reset()
        while self._shares():
            self._shared += 1
            if not os.path.exists(self._socket()):
                break
            super().reset()

    def _name(self) -> str:
        return f"container {self.get_option('vmid')} on {self._node()}"

    def _node(self) -> str:
        local = self.get_option("pct_transport") == "local"
        return "this machine" if local else (self.get_option("host") or self._play_context.remote_addr)

    def _attach(self, cmd: str, stdin: bool, run) -> attach.Outcome:
        """Run ``cmd`` inside through ``run``, which executes one command line and returns (rc, stdout, stderr).

        Only what never began is tried again. Raises AnsibleConnectionFailure where the container could not be used,
        or where the connection was cut while the command ran.
        """
        attempts = int(self.get_option("reconnection_retries")) + 1
        for attempt in range(1, attempts + 1):
            nonce = secrets.token_hex(8)
            script = attach.node_script(
                self.get_option("vmid"),
                to_text(cmd),
                nonce,
                stdin=stdin,
                method=self.get_option("method"),
                lxc_path=self.get_option("lxc_path"),
            )
            try:
                with self._place() as refused:
                    outcome = attach.read(nonce, *(refused or run(self._command_line(script))))
            except AnsibleControlPersistBrokenPipeError as error:
                # The shared connection had gone before anything was sent.
                outcome = attach.Outcome(255, b"", to_bytes(str(error)), "node_unreachable")
            if outcome.failure is None:
                return outcome
            if not outcome.passing or attempt == attempts:
                raise AnsibleConnectionFailure(f"{self._name()}: {outcome.words()}")
            pause = min(2 ** (attempt - 1), 10) * (0.5 + secrets.randbelow(1000) / 1000)
            display.vv(f"attempt {attempt} of {attempts}: {outcome.words()}; again in {pause:.1f} s", host=self._name())
            # Spread out: a node that refused forty connections at once would refuse forty a second later too.
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    @contextlib.contextmanager
    def _place(self):
        """Hold one of the places on the shared connections, the first that is free, and have its connection up.

        Yields (rc, stdout, stderr) of ssh where that connection cannot be made, else None. Places are locks of bytes in
        a file beside the connections' sockets, so those of a process that was killed are free at once.
        """
        self.host = self._node()
        if self.get_option("pct_transport") == "local" or not self._shares():
            yield None
            return
        makedirs_safe(self._sockets(), 0o700)
        self._shared = 0
        with open(f"{self._socket()}.places", "ab") as places:
            for place in itertools.count():
                if _lock(places, place):
                    break
            self._shared = place // SESSIONS
            yield self._open(places)

    def _open(self, places):
        """Have this place's connection up; (rc, stdout, stderr) where it cannot be made, else None.

        One process makes it and the others wait, so that forty tasks do not ask the node for forty connections. Who has
        waited in vain tries the connection with its own command: an answer that is long in coming is not waited for in turn.
        """
        if self._is_up():
            return None
        byte = OPENING + self._shared
        if not _lock(places, byte):
            fcntl.lockf(places, fcntl.LOCK_EX, 1, byte)
            fcntl.lockf(places, fcntl.LOCK_UN, 1, byte)
            return None
        try:
            if self._is_up():
                return None
            # Not -f -N, whose process sshpass takes with it when it ends.
            command = self._build_command(self.get_option("ssh_executable"), "ssh", self.host, "true")
            done = self._bare_run(command, None, sudoable=False, checkrc=False)
            return (255, *done[1:]) if done[0] else None  # sshpass has codes of its own
        finally:
            fcntl.lockf(places, fcntl.LOCK_UN, 1, byte)

    def _is_up(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self._socket()) == 0

    def _shares(self) -> bool:
        """Whether connections to the node are shared, under names that Ansible gives them."""
        given = " ".join(
            self.get_option(name) or "" for name in ("ssh_args", "ssh_common_args", "ssh_extra_args")
        ).lower()
        named = self.get_option("control_path") or "controlpath" in given
        return (
            "controlmaster=auto" in given and "controlpersist=" in given.replace("controlpersist=no", "") and not named
        )

    def _sockets(self) -> str:
        return unfrackpath(self.get_option("control_path_dir"))

    def _socket(self) -> str:
        path = self._create_control_path(self._node(), self.get_option("port"), self.get_option("remote_user"))
        return path % {"directory": self._sockets()}

    def _create_control_path(self, *node):
        """The parent's names; the first connection is thus shared with ansible.builtin.ssh to the node."""
        return super()._create_control_path(*node, connection=self._shared or None)

    def _command_line(self, script: str) -> list[bytes]:
        if len(to_bytes(script)) >= attach.ARGUMENT_LIMIT:
            raise AnsibleError(
                f"{self._name()}: the command takes {len(to_bytes(script))} bytes, and one argument is limited to "
                f"{attach.ARGUMENT_LIMIT}: send it as a file (module script) instead"
            )
        executable = self.get_option("ssh_executable")
        if self.get_option("pct_transport") == "local":
            # The parent looks for become's prompts only in a command line that names its ssh executable: here as $0.
            return [b"/bin/sh", b"-c", to_bytes(script), to_bytes(executable)]
        return self._build_command(executable, "ssh", self.host, f"/bin/sh -c {shlex.quote(script)}")

    def _stream(self, command: list[bytes], data=None, stdin=None, target=None):
        """Run a command line with ``data``, or a file, as stdin, and write its stdout to ``target``, a file, if there is one.

        A file passes through this process's memory in pieces at most. Raises OSError when ``target`` cannot be written.

        With a password for the node, the shared connection is up and asks for it no more.
        """
        if self.sshpass_pipe:
            for end in self.sshpass_pipe:
                os.close(end)
            self.sshpass_pipe = None
            command = command[command.index(to_bytes(self.get_option("ssh_executable"))) :]
        if target is None:
            source = {"input": data} if data is not None else {"stdin": stdin or subprocess.DEVNULL}
            done = subprocess.run(command, capture_output=True, check=False, **source)
            return done.returncode, done.stdout, done.stderr
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said) as process,
        ):
            try:
                shutil.copyfileobj(process.stdout, target, 1 << 20)
            except OSError:
                process.kill()
                raise
            process.wait()
            said.seek(0)
            return process.returncode, b"", said.read()


def _lock(stream, byte: int) -> bool:
    """Lock one byte of an open file, without waiting; whether it was free."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True
