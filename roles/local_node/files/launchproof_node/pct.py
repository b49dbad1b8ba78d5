# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pct for the local node, with the messages and exit codes seen on Proxmox VE 8.2.

exec does what the original does (exists here, runs, environment, lxc-attach) and no more imports than that needs:
the original spends half a second on it, nearly all of it in starting Perl.
"""

import os
import sys

from .state import running

PATH = "/sbin:/bin:/usr/sbin:/usr/bin"


class Exit(Exception):
    """End with this text on stderr and this code."""

    def __init__(self, text, code=255):
        super().__init__(text)
        self.code = code


def main(directory, arguments):
    """Run one command; returns the exit code."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    function = COMMANDS.get(command)
    try:
        if function is None:
            raise Exit(
                f"ERROR: unknown command 'pct {command}'\nusage: pct <COMMAND> [ARGS] [OPTIONS]; here: {' '.join(sorted(COMMANDS))}"
            )
        return function(_Node(directory), rest)
    except Exit as end:
        print(end, file=sys.stderr)
        return end.code


class _Node:
    """The settings, read only by the commands that need them."""

    def __init__(self, directory):
        self.directory = directory

    @property
    def settings(self):
        from .settings import Settings

        return Settings(self.directory)

    def config(self, vmid):
        """The text of the container's configuration file; without one, Perl's die gives the code of errno: 2."""
        if not vmid.isdigit():
            raise Exit(f"400 Parameter verification failed.\nvmid: type check ('integer') failed - got '{vmid}'")
        path = os.path.join(self.directory, "pve", "lxc", f"{vmid}.conf")
        try:
            with open(path) as source:
                return source.read()
        except OSError:
            raise Exit(f"Configuration file 'nodes/{self.settings.node}/lxc/{vmid}.conf' does not exist", 2) from None


def parse_exec(arguments):
    """(vmid, keep environment, command) of `exec VMID [--keep-env 0|1] -- COMMAND`; raises Exit as pct complains."""
    if not arguments:
        raise Exit("400 not enough arguments\npct exec <vmid> [<extra-args>] [OPTIONS]")
    vmid, keep, rest = arguments[0], True, list(arguments[1:])
    command = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            command += rest
            break
        name, equals, value = word.partition("=")
        if name in ("--keep-env", "-keep-env"):
            keep = (value if equals else rest.pop(0) if rest else "1") not in ("0", "no", "off", "false")
        elif word.startswith("-"):
            # Without -- the options of the command are taken for pct's own.
            raise Exit(
                f"Unknown option: {word.lstrip('-')}\n400 unable to parse option\npct exec <vmid> [<extra-args>] [OPTIONS]"
            )
        else:
            command.append(word)
    if not command:
        raise Exit("missing command")
    return vmid, keep, command


def _exec(node, arguments):
    vmid, keep, command = parse_exec(arguments)
    node.config(vmid)
    if int(vmid) not in running():
        raise Exit(f"container '{vmid}' not running!")
    environment = dict(os.environ) if keep else {"TERM": os.environ.get("TERM", "linux")}
    environment["PATH"] = PATH
    option = "--keep-env" if keep else "--clear-env"
    os.execve("/usr/bin/lxc-attach", ["lxc-attach", "-n", vmid, option, "--", *command], environment)


def _status(node, arguments):
    vmid = _only(arguments, "pct status <vmid> [OPTIONS]")
    node.config(vmid)
    print("status:", "running" if int(vmid) in running() else "stopped")
    return 0


def _list(node, arguments):
    from .config import load

    active = running()
    print("VMID       Status     Lock         Name")
    folder = node.settings.configs
    for path in sorted(folder.glob("*.conf"), key=lambda path: int(path.stem)):
        config, _pending = load(path.read_text())
        status = "running" if int(path.stem) in active else "stopped"
        print(f"{path.stem:<10} {status:<10} {config.get('lock', ''):<12} {config.get('hostname', ''):<20}".rstrip())
    return 0


def _config(node, arguments):
    from .config import dump, load

    vmid = _only([word for word in arguments if word not in ("--current", "-current")], "pct config <vmid> [OPTIONS]")
    config, pending = load(node.config(vmid))
    if "--current" not in arguments and "-current" not in arguments:
        config.update({key: value for key, value in pending.items() if value is not None})
        for key in [key for key, value in pending.items() if value is None]:
            config.pop(key, None)
    print(dump(config, {}), end="")
    return 0


def _pending(node, arguments):
    from .config import load

    vmid = _only(arguments, "pct pending <vmid>")
    config, pending = load(node.config(vmid))
    for key in sorted(set(config) | set(pending)):
        if key in config:
            print(f"cur {key}: {config[key]}")
        if key in pending:
            print(f"del {key}" if pending[key] is None else f"new {key}: {pending[key]}")
    return 0


def _push(node, arguments):
    vmid, source, target, options = _copy_arguments(node, arguments, "push", ("perms", "user", "group"))
    script = 'cat >"$1" || exit 1; [ -z "$2" ] || chmod "$2" "$1"; [ -z "$3" ] || chown "$3" "$1"'
    owner = f"{options.get('user', '')}:{options['group']}" if "group" in options else options.get("user", "")
    # As on a real node: what goes wrong here is said on stderr and the exit code is 0 all the same.
    try:
        with open(source, "rb") as data:
            code = _attach(vmid, script, [target, options.get("perms", ""), owner], stdin=data)
    except OSError as error:
        print(f"failed to open {source}: {error.strerror}", file=sys.stderr)
        return 0
    if code != 0:
        print(f"failed to create file: {target}", file=sys.stderr)
    return 0


def _pull(node, arguments):
    vmid, source, target, _options = _copy_arguments(node, arguments, "pull", ("perms", "user", "group"))
    try:
        with open(target, "wb") as out:  # a failed pull leaves it empty, as seen
            code = _attach(vmid, 'cat "$1"', [source], stdout=out)
    except OSError as error:
        print(f"failed to create {target}: {error.strerror}", file=sys.stderr)
        return 0
    if code != 0:
        print(f"failed to open {source}", file=sys.stderr)
    return 0


def _copy_arguments(node, arguments, verb, known):
    words, options, rest = [], {}, list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            if name not in known:
                raise Exit(f"Unknown option: {name}\n400 unable to parse option")
            options[name] = value if equals else rest.pop(0) if rest else ""
        else:
            words.append(word)
    if len(words) != 3:
        raise Exit(f"400 not enough arguments\npct {verb} <vmid> <file> <path> [OPTIONS]")
    node.config(words[0])
    if int(words[0]) not in running():
        raise Exit(f"can only {verb} files {'to' if verb == 'push' else 'from'} a running CT")
    return (*words, options)


def _attach(vmid, script, arguments, **streams):
    import subprocess

    command = ["lxc-attach", "-n", vmid, "--clear-env", "--", "/bin/sh", "-c", script, "sh", *arguments]
    return subprocess.call(command, **{"stdin": subprocess.DEVNULL, **streams})


def _only(arguments, usage):
    if len(arguments) != 1:
        raise Exit(f"400 {'not enough' if not arguments else 'too many'} arguments\n{usage}")
    return arguments[0]


def _through_api(method, path, task=True):
    """A command that is one request; its options are the request's parameters."""

    def command(node, arguments):
        from .client import ApiError, Client

        vmid, values = _options(arguments)
        if path is not None:
            node.config(vmid)
        else:
            values["vmid"] = vmid
        settings = node.settings
        url = f"/nodes/{settings.node}/lxc" + (f"/{vmid}{path}" if path is not None else "")
        try:
            client = Client(settings)
            data = client.request(method, url, values)
            if task:
                status, _lines = client.wait(data)
                if status != "OK" and not status.startswith("WARNINGS"):
                    raise Exit(status)
        except ApiError as error:
            raise Exit("\n".join(error.lines())) from None
        except OSError as error:
            raise Exit(f"connection to the API failed: {error}") from None
        return 0

    return command


def _options(arguments):
    if not arguments:
        raise Exit("400 not enough arguments")
    words, values, rest = [], {}, list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            # A flag alone, such as --force, means 1.
            values[name] = value if equals else rest.pop(0) if rest and not rest[0].startswith("--") else "1"
        else:
            words.append(word)
    if len(words) == 2 and words[1]:
        values["ostemplate"] = words[1]
    return words[0], values


COMMANDS = {
    "exec": _exec,
    "status": _status,
    "list": _list,
    "config": _config,
    "pending": _pending,
    "push": _push,
    "pull": _pull,
    "create": _through_api("POST", None),
    "set": _through_api("PUT", "/config", task=False),
    "start": _through_api("POST", "/status/start"),
    "stop": _through_api("POST", "/status/stop"),
    "shutdown": _through_api("POST", "/status/shutdown"),
    "reboot": _through_api("POST", "/status/reboot"),
    "destroy": _through_api("DELETE", ""),
}
