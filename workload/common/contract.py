# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all programs of this folder agree on: exit codes, options, the format of a line, and sd_notify."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OK = 0
USAGE = 64
BAD_DATA = 65
UNAVAILABLE = 69
INTERNAL = 70
TOO_MANY_ERRORS = 75
CONFIGURATION = 78


class Fatal(Exception):
    """An end with a name: exit ``code``, one word for ``reason`` and a sentence that says what to do."""

    def __init__(self, code: int, reason: str, message: str):
        super().__init__(message)
        self.code = code
        self.reason = reason


class Parser(argparse.ArgumentParser):
    """argparse with the exit code of a usage error that this contract has (64, sysexits.h) instead of 2."""

    def error(self, message: str) -> None:
        raise Fatal(USAGE, "usage", f"{message}. See --help.")


def whole(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer not below ``minimum``."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    parse.__name__ = f"integer >= {minimum}"
    return parse


def common_options(parser: argparse.ArgumentParser) -> None:
    """Options that every program of this folder has."""
    parser.add_argument("--check", action="store_true", help="run the preflight alone and exit")
    parser.add_argument(
        "--heartbeat", type=Path, help="heartbeat file; default: heartbeat.json in the folder of this run"
    )


def format_event(event: str, fields: dict[str, Any]) -> str:
    """``ts=… ev=… key=value …``; a value with blanks, quotes, ``=`` or control characters becomes a JSON string."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    parts = [f"ts={stamp}", f"ev={event}"]
    for key, value in fields.items():
        text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        if text == "" or re.search(r'[\s"=\\\x00-\x1f\x7f]', text):
            text = json.dumps(text)
        parts.append(f"{key}={text}")
    return " ".join(parts)


def notify(message: str) -> None:
    """Send one sd_notify datagram; nothing happens without NOTIFY_SOCKET (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
