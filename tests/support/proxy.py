# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A TCP proxy that makes a server slow, or silent."""

import socket
import threading
import time

CHUNK = 16384


class Proxy:
    """Passes bytes between its own port and a server's; a context manager."""

    def __init__(self, port: int, rate: float = float("inf"), latency: float = 0.0):
        """``port`` of the server on 127.0.0.1; ``rate`` in bytes/s towards it; ``latency`` in s for each of its answers."""
        self._port, self._rate, self._latency = port, rate, latency
        self._open = threading.Event()
        self._open.set()
        self.moved = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._listener.close()
        self._open.set()

    def freeze(self) -> None:
        """Accept, and pass nothing on, until :meth:`thaw`."""
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                self._open.wait()
                # Not a wait for an event: the slowness is what is made here.
                time.sleep(len(data) / self._rate if to_server else self._latency)
                sink.sendall(data)
                self.moved += len(data) if to_server else 0
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()
