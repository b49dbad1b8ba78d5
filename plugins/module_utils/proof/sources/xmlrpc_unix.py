# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""XML-RPC over a Unix socket."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from xmlrpc.client import Fault

__all__ = ["Fault", "server"]
TIMEOUT = 30  # s for an answer


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str):
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def make_connection(self, _host) -> _Connection:
        return _Connection(self._path)


def server(path: str) -> xmlrpc.client.ServerProxy:
    """What calls the server that listens on the socket I(path). Its methods raise OSError and Fault."""
    return xmlrpc.client.ServerProxy("http://localhost", transport=_Transport(path))
