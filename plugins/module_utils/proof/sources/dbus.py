# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A D-Bus client that is just large enough to talk to systemd: the standard library has none.

Source of all formats: D-Bus Specification, "Message Protocol" and "Authentication Protocol". File descriptors are not
passed. Values are plain builtins: an array is a list (C(ay) is bytes, C(a{..}) a dict), a struct a tuple. A variant is its
value when it is read, and (signature, value) when it is written.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import struct
import time
from typing import NamedTuple

FIXED = {"y": "B", "b": "I", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d", "h": "I"}
ALIGNED = {"y": 1, "n": 2, "q": 2, "x": 8, "t": 8, "d": 8, "g": 1, "v": 1, "(": 8, "{": 8}  # all others: 4
ORDERS = {0x6C: "<", 0x42: ">"}  # "l" and "B", the first byte of a message
CALL, ANSWER, ERROR, SIGNAL = 1, 2, 3, 4
PATH, INTERFACE, MEMBER, ERROR_NAME, REPLY_SERIAL, DESTINATION, SIGNATURE = 1, 2, 3, 4, 5, 6, 8
LARGEST = 1 << 27  # bytes of a message, by the specification
PIECE = 1 << 17  # bytes read at once
AUTH_LINES = 16384  # bytes of an answer to the authentication that are certainly none


class DBusError(Exception):
    """The connection cannot be had, is lost, or says what is no D-Bus."""


@functools.cache
def types(signature: str) -> tuple:
    """Split a signature into its complete types: "a{sv}u" is ("a{sv}", "u")."""
    found, start = [], 0
    while start < len(signature):
        end = _end(signature, start)
        found.append(signature[start:end])
        start = end
    return tuple(found)


def _end(signature: str, start: int) -> int:
    """Where the complete type that begins at I(start) ends."""
    while signature[start : start + 1] == "a":
        start += 1
    if signature[start : start + 1] not in ("(", "{"):
        return start + 1
    closing = {"(": ")", "{": "}"}[signature[start]]
    start += 1
    while signature[start : start + 1] != closing:
        if start >= len(signature):
            raise DBusError("%r is no signature" % signature)
        start = _end(signature, start)
    return start + 1


def marshal(signature: str, values) -> bytes:
    """The bytes of I(values), one for each complete type of I(signature), little-endian."""
    out = bytearray()
    for kind, value in zip(types(signature), values):
        _write(out, kind, value)
    return bytes(out)


def _pad(out: bytearray, alignment: int) -> None:
    out.extend(bytes(-len(out) % alignment))


def _write(out: bytearray, kind: str, value) -> None:
    first = kind[0]
    _pad(out, ALIGNED.get(first, 4))
    if first in FIXED:
        out.extend(struct.pack("<" + FIXED[first], value))
    elif first in "so":
        data = value.encode()
        out.extend(struct.pack("<I", len(data)) + data + b"\0")
    elif first == "g":
        out.extend(bytes([len(value)]) + value.encode() + b"\0")
    elif first == "v":
        _write(out, "g", value[0])
        _write(out, value[0], value[1])
    elif first == "a":
        size_at = len(out)
        out.extend(b"\0\0\0\0")
        _pad(out, ALIGNED.get(kind[1], 4))
        begin = len(out)
        for item in value.items() if kind[1] == "{" else value:
            _write(out, kind[1:], item)
        struct.pack_into("<I", out, size_at, len(out) - begin)
    else:
        for part, item in zip(types(kind[1:-1]), value):
            _write(out, part, item)


class Reader:
    """Reads values one after another out of the bytes of a message. Raises struct.error and IndexError beyond its end."""

    def __init__(self, data: bytes, order: str = "<", offset: int = 0):
        self.data, self.order, self.offset = data, order, offset

    def _align(self, kind: str) -> None:
        self.offset += -self.offset % ALIGNED.get(kind, 4)

    def _fixed(self, kind: str):
        self._align(kind)
        code = self.order + FIXED[kind]
        (value,) = struct.unpack_from(code, self.data, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def _text(self, length: int) -> str:
        start, self.offset = self.offset, self.offset + length + 1
        return self.data[start : start + length].decode(errors="replace")

    def _array(self, kind: str) -> int:
        """Where the array that begins here ends."""
        length = self._fixed("u")
        self._align(kind)
        if self.offset + length > len(self.data):
            raise IndexError("an array that is longer than its message")
        return self.offset + length

    def read(self, kind: str):
        """The value of the complete type I(kind)."""
        first = kind[0]
        if first in FIXED:
            value = self._fixed(first)
            return bool(value) if first == "b" else value
        if first in "so":
            return self._text(self._fixed("u"))
        if first == "g":
            return self._text(self._fixed("y"))
        if first == "v":
            return self.read(self.read("g"))
        if first == "a":
            end = self._array(kind[1])
            if kind == "ay":
                start, self.offset = self.offset, end
                return bytes(self.data[start:end])
            found = []
            while self.offset < end:
                found.append(self.read(kind[1:]))
            return dict(found) if kind[1] == "{" else found
        self._align(first)
        return tuple([self.read(part) for part in types(kind[1:-1])])

    def skip(self, kind: str) -> None:
        """Go past a value without making one: an array by its length."""
        first = kind[0]
        if first == "a":
            self.offset = self._array(kind[1])
        elif first in "so":
            length = self._fixed("u")
            self.offset += length + 1
        elif first == "v":
            self.skip(self.read("g"))
        elif first in "({":
            self._align(first)
            for part in types(kind[1:-1]):
                self.skip(part)
        else:
            self.read(kind)

    def properties(self, wanted) -> dict:
        """The entries of an C(a{sv}) whose names are in I(wanted); the others are passed over."""
        found, end = {}, self._array("{")
        while self.offset < end:
            self._align("{")
            name, kind = self.read("s"), self.read("g")
            if name in wanted:
                found[name] = self.read(kind)
            else:
                self.skip(kind)
        return found


class Message(NamedTuple):
    """What came in; I(fields) are the header's, by number."""

    type: int
    fields: dict
    body: Reader

    def values(self) -> list:
        """One value for each type of the body's signature."""
        self.body.offset = 0
        return [self.body.read(kind) for kind in types(self.fields.get(SIGNATURE, ""))]

    @property
    def error(self) -> tuple | None:
        """(name, what it says) of an error, None for another message."""
        if self.type != ERROR:
            return None
        text = self.values() if self.fields.get(SIGNATURE, "").startswith("s") else []
        return self.fields.get(ERROR_NAME, ""), str(text[0]) if text else self.fields.get(ERROR_NAME, "")


def call(serial: int, destination: str, path: str, interface: str, member: str, signature: str, values) -> bytes:
    """The bytes of a method call."""
    body = marshal(signature, values)
    fields = [
        (PATH, ("o", path)), (INTERFACE, ("s", interface)), (MEMBER, ("s", member)), (DESTINATION, ("s", destination)),
    ]  # fmt: skip
    if signature:
        fields.append((SIGNATURE, ("g", signature)))
    head = bytearray(marshal("yyyyuua(yv)", (0x6C, CALL, 0, 1, len(body), serial, fields)))
    _pad(head, 8)
    return bytes(head) + body


def parse(data: bytearray, start: int = 0) -> tuple:
    """(message, where it ends) of what begins at I(start), or (None, I(start)) when it is not all there yet."""
    if len(data) - start < 16:
        return None, start
    order = ORDERS.get(data[start])
    if order is None:
        raise DBusError("what came is no D-Bus message")
    length, _serial, fields = struct.unpack_from(order + "III", data, start + 4)
    body = start + 16 + fields + -fields % 8
    end = body + length
    if end - start > LARGEST:
        raise DBusError("a message of %d bytes" % (end - start))
    if len(data) < end:
        return None, start
    head = Reader(bytes(data[start:body]), order, 12)
    return Message(data[start + 1], dict(head.read("a(yv)")), Reader(bytes(data[body:end]), order)), end


class Connection:
    """A connection to the socket I(path): calls go out, answers and signals come in. Raises DBusError.

    I(timeout) s is what one answer may take.
    """

    def __init__(self, path: str, timeout: float):
        self.timeout = timeout
        self._in = bytearray()
        self._serial = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
            self._authenticate()
        except OSError as error:
            self._socket.close()
            raise DBusError("%s: %s" % (path, error.strerror or error)) from error
        except DBusError:
            self._socket.close()
            raise

    def _authenticate(self) -> None:
        """Be known by what the kernel says of this process: SASL EXTERNAL.

        BEGIN goes with it, as libsystemd does it: systemd does not look at a first message that comes in one read with BEGIN.
        """
        identity = str(os.geteuid()).encode().hex().encode()
        self._socket.sendall(b"\0AUTH EXTERNAL " + identity + b"\r\nBEGIN\r\n")
        while b"\r\n" not in self._in:
            data = self._socket.recv(PIECE)
            if not data or len(self._in) > AUTH_LINES:
                raise DBusError("the bus closed the connection while we said who we are")
            self._in.extend(data)
        answer, _end, self._in = self._in.partition(b"\r\n")
        if not answer.startswith(b"OK "):
            raise DBusError("the bus does not let us in: %s" % answer.decode(errors="replace"))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, destination: str, path: str, interface: str, member: str, signature: str = "", values=()) -> int:
        """Call a method and return the serial number that its answer will name."""
        self._serial += 1
        try:
            self._socket.sendall(call(self._serial, destination, path, interface, member, signature, values))
        except OSError as error:
            raise DBusError("the connection is lost: %s" % (error.strerror or error)) from error
        return self._serial

    def messages(self, wait: float = 0.0) -> list:
        """The messages that are there, in their order; waits at most I(wait) s for a first one."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        end = time.monotonic() + wait
        found = []
        while not found:
            if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
                break
            try:
                data = self._socket.recv(PIECE)
            except OSError as error:
                raise DBusError("the connection is lost: %s" % (error.strerror or error)) from error
            if not data:
                raise DBusError("the connection is lost: it was closed")
            self._in.extend(data)
            found = self._parse()
        return found

    def _parse(self) -> list:
        found, end = [], 0
        try:
            while True:
                message, end = parse(self._in, end)
                if message is None:
                    break
                found.append(message)
        except (struct.error, IndexError, KeyError) as error:
            raise DBusError("what came is no D-Bus message: %s" % error) from error
        del self._in[:end]
        return found

    def answers(self, serials, on_signal, on_answer=None) -> dict:
        """{serial: message} of the answers to I(serials); signals that come before the last of them go to I(on_signal)."""
        left, found = set(serials), {}
        while left:
            messages = self.messages(self.timeout)  # many answers may take longer, as long as one comes after the other
            if not messages:
                raise DBusError("no answer within %g s" % self.timeout)
            for message in messages:
                serial = message.fields.get(REPLY_SERIAL)
                if message.type == SIGNAL:
                    on_signal(message)
                elif serial in left:
                    left.discard(serial)
                    found[serial] = message
                    if on_answer:
                        on_answer(serial)
        return found
