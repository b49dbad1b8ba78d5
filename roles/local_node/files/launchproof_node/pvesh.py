# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pvesh get|set|create|delete PATH [-KEY VALUE ...] [--output-format json|json-pretty], as proxmoxer's backends call it."""

import json
import sys

from .client import ApiError, Client
from .settings import Settings

METHODS = {"get": "GET", "set": "PUT", "create": "POST", "delete": "DELETE"}
USAGE = "usage: pvesh get|set|create|delete PATH [-KEY VALUE ...] [--output-format json|json-pretty]"
# Options of the tool itself, each with a value; the others are parameters of the request.
OWN = ("output-format", "human-readable", "noborder", "noheader", "quiet")


def parse(arguments):
    """(method, path, parameters, own options) of a command line; raises ValueError with the reason."""
    if len(arguments) < 2 or arguments[0] not in METHODS:
        raise ValueError(USAGE)
    values, own = {}, {}
    rest = list(arguments[2:])
    while rest:
        option = rest.pop(0)
        if not option.startswith("-"):
            raise ValueError(f"unexpected argument {option}\n{USAGE}")
        name, equals, value = option.lstrip("-").partition("=")
        if not equals:
            if not rest:
                raise ValueError(f"option {option} needs a value\n{USAGE}")
            value = rest.pop(0)
        (own if name in OWN else values)[name] = value
    return METHODS[arguments[0]], "/" + arguments[1].strip("/"), values, own


def main(directory, arguments):
    """Run one request; returns the exit code."""
    try:
        method, path, values, own = parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 255
    try:
        client = Client(Settings(directory))
        data = client.request(method, path, values)
        if method != "GET" and isinstance(data, str) and data.startswith("UPID:"):
            # pvesh runs the worker in the foreground: it returns when the task has ended.
            status, lines = client.wait(data)
            if status != "OK" and not status.startswith("WARNINGS"):
                print("\n".join(lines[:-1] or [status]), file=sys.stderr)
                return 255
    except ApiError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return 255
    except OSError as error:
        print(f"connection to the API failed: {error}", file=sys.stderr)
        return 255
    if data is not None:
        print(json.dumps(data, indent=None if own.get("output-format") == "json" else 2, sort_keys=True))
    elif own.get("output-format") == "json":
        print("null")
    return 0
