# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Messages as bytes and back, and a bus that answers well, late, badly, or not at all. Real systemd: tests/integration."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import dbus
from hypothesis import given, settings
from hypothesis import strategies as st

INTEGERS = {"y": (0, 255), "n": (-(2**15), 2**15 - 1), "q": (0, 2**16 - 1), "i": (-(2**31), 2**31 - 1),
            "u": (0, 2**32 - 1), "x": (-(2**63), 2**63 - 1), "t": (0, 2**64 - 1)}  # fmt: skip
BASIC = [*INTEGERS, "b", "d", "s", "o", "g"]
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)


def signatures():
    def more(inner):
        structs = st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(%s)" % "".join(parts))
        dicts = st.tuples(st.sampled_from([*INTEGERS, "b", "s"]), inner).map(lambda pair: "a{%s}" % "".join(pair))
        return inner.map("a{}".replace("{}", "%s").__mod__) | structs | dicts

    return st.recursive(st.sampled_from([*BASIC, "v"]), more, max_leaves=6)


def values(kind: str):
    """(what is written, what is read) for a type."""
    first = kind[0]
    if first in INTEGERS:
        return st.integers(*INTEGERS[first]).map(lambda value: (value, value))
    if first == "b":
        return st.booleans().map(lambda value: (value, value))
    if first == "d":
        return st.floats(allow_nan=False).map(lambda value: (value, value))
    if first in "so":
        return TEXT.map(lambda value: (value, value))
    if first == "g":
        return signatures().map(lambda value: (value, value))
    if first == "v":
        # Not a variant in a variant in a variant: that is no other case.
        return st.sampled_from(["s", "u", "as", "(ub)"]).flatmap(
            lambda inner: values(inner).map(lambda pair: ((inner, pair[0]), pair[1]))
        )
    if first == "(":
        return st.tuples(*map(values, dbus.types(kind[1:-1]))).map(
            lambda pairs: (tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        )
    if kind == "ay":
        return st.binary(max_size=20).map(lambda value: (value, value))
    if kind[1] == "{":
        key, value = dbus.types(kind[2:-1])
        return st.dictionaries(values(key).map(lambda pair: pair[0]), values(value), max_size=4).map(
            lambda pairs: ({k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()})
        )
    return st.lists(values(kind[1:]), max_size=4).map(
        lambda pairs: ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    )


@settings(deadline=None)
@given(st.lists(signatures(), min_size=1, max_size=4).flatmap(
    lambda kinds: st.tuples(st.just(kinds), st.tuples(*map(values, kinds)))
))  # fmt: skip
def test_what_is_written_is_read_again_and_can_be_passed_over(case):
    kinds, pairs = case
    assert dbus.types("".join(kinds)) == tuple(kinds)
    data = dbus.marshal("".join(kinds), [pair[0] for pair in pairs])
    reader, skipper = dbus.Reader(data), dbus.Reader(data)
    for kind, (_written, read) in zip(kinds, pairs):
        assert reader.read(kind) == read
        skipper.skip(kind)
        assert skipper.offset == reader.offset
    assert reader.offset == len(data)


def test_bytes_are_those_of_the_specification():
    """The examples of the D-Bus Specification, "Marshaling (Wire Format)": alignment, lengths, a header's fields."""
    assert dbus.marshal("ai", [[5]]) == b"\x04\0\0\0\x05\0\0\0"
    assert dbus.marshal("ax", [[5]]) == b"\x08\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0", "the length leaves out the padding"
    assert dbus.marshal("yv", [1, ("s", "hi")]) == b"\x01\x01s\0\x02\0\0\0hi\0"
    assert dbus.marshal("gs", ["a{sv}", ""]) == b"\x05a{sv}\0\0\0\0\0\0\0"
    data = dbus.call(7, "d.e", "/p", "i.f", "M", "s", ("x",))
    assert (
        data[:16]
        == b"l\x01\0\x01" + struct.pack("<III", 6, 7, len(data) - 6 - 16 - (-(len(data) - 6) % 8) - 0)[:8] + data[12:16]
    )
    message, end = dbus.parse(bytearray(data))
    assert end == len(data) and (len(data) - 6) % 8 == 0
    assert (message.type, message.values(), message.values()) == (dbus.CALL, ["x"], ["x"])
    assert {key: message.fields[key] for key in (dbus.PATH, dbus.MEMBER)} == {dbus.PATH: "/p", dbus.MEMBER: "M"}


def test_a_big_endian_message_is_understood():
    body = struct.pack(">I", 258)
    fields = b"\x08\x01g\0\x01u\0\0"[:7]
    head = b"B\x02\0\x01" + struct.pack(">III", len(body), 1, len(fields)) + fields
    message, _end = dbus.parse(bytearray(head + bytes(-len(head) % 8) + body))
    assert message.values() == [258]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_nonsense_is_an_error_or_not_complete_and_never_more(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbus.Connection, "__init__", lambda self: setattr(self, "_in", bytearray(data)))
        try:
            assert isinstance(dbus.Connection()._parse(), list)
        except dbus.DBusError as error:
            assert str(error)


@settings(deadline=None)
@given(TEXT, st.sampled_from(["s", "u", "as", "a(sv)"]).flatmap(lambda kind: st.tuples(st.just(kind), values(kind))))
def test_only_the_wanted_properties_are_made(name, other):
    kind, (written, _read) = other
    data = dbus.marshal("a{sv}", [{"first": ("b", True), "not" + name: (kind, written), "last": ("as", ["x"])}])
    assert dbus.Reader(data).properties({"first", "last"}) == {"first": True, "last": ["x"]}


@pytest.mark.parametrize("signature", ["(", "(s", "a{s"])
def test_what_is_no_signature_is_an_error(signature):
    with pytest.raises(dbus.DBusError, match="no signature"):
        dbus.types(signature)


# ---- a bus ----


class Bus(threading.Thread):
    """A server on a socket: lets in whoever asks, then does what the test says with the connection."""

    def __init__(self, path, behave, hello=b"OK 1234deadbeef\r\n"):
        super().__init__(daemon=True)
        self.path, self.behave, self.hello = str(path), behave, hello
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen()
        self.start()

    def run(self):
        client, _address = self.socket.accept()
        with client:
            said = b""
            while not said.endswith(b"BEGIN\r\n"):
                said += client.recv(100)
            self.said = said
            client.sendall(self.hello)
            self.behave(client)
        self.socket.close()


def answer(serial, body=b"", signature="", kind=dbus.ANSWER, more=()):
    fields = [(dbus.REPLY_SERIAL, ("u", serial)), *more]
    if signature:
        fields.append((dbus.SIGNATURE, ("g", signature)))
    head = dbus.marshal("yyyyuua(yv)", (0x6C, kind, 0, 1, len(body), 99, fields))
    return head + bytes(-len(head) % 8) + body


def read_calls(client, count):
    data, serials = bytearray(), []
    while len(serials) < count:
        data += client.recv(4096)
        end = 0
        while True:
            start = end
            message, end = dbus.parse(data, end)
            if message is None:
                break
            serials.append(struct.unpack_from("<I", data, start + 8)[0])
        del data[:end]
    return serials


def ask(connection, count=1):
    return [connection.send("x", "/x", "x.y", "Z") for _number in range(count)]


def test_who_we_are_is_said_as_a_number(tmp_path):
    bus = Bus(tmp_path / "bus", lambda client: None)
    dbus.Connection(bus.path, 5).close()
    bus.join()
    assert bus.said == b"\0AUTH EXTERNAL %s\r\nBEGIN\r\n" % str(os.geteuid()).encode().hex().encode()


def test_answers_come_in_any_order_in_pieces_and_among_signals(tmp_path):
    def behave(client):
        first, second = read_calls(client, 2)
        signal = answer(0, dbus.marshal("s", ["news"]), "s", dbus.SIGNAL)
        data = signal + answer(second, dbus.marshal("u", [2]), "u") + answer(first, dbus.marshal("s", ["one"]), "s")
        for position in range(0, len(data), 7):
            client.sendall(data[position : position + 7])

    connection = dbus.Connection(Bus(tmp_path / "bus", behave).path, 5)
    serials, signals, order = ask(connection, 2), [], []
    found = connection.answers(serials, signals.append, order.append)
    assert [found[serial].values() for serial in serials] == [["one"], [2]]
    assert order == serials[::-1] and [signal.values() for signal in signals] == [["news"]]
    connection.close()


def test_an_error_is_a_value(tmp_path):
    def behave(client):
        (serial,) = read_calls(client, 1)
        name = (dbus.ERROR_NAME, ("s", "org.example.No"))
        client.sendall(answer(serial, dbus.marshal("s", ["not today"]), "s", dbus.ERROR, [name]))

    connection = dbus.Connection(Bus(tmp_path / "bus", behave).path, 5)
    (message,) = connection.answers(ask(connection), lambda signal: None).values()
    assert message.error == message.error == ("org.example.No", "not today")
    connection.close()


@pytest.mark.parametrize(
    ("behave", "text"),
    [
        (lambda client: read_calls(client, 1), "closed"),
        (lambda client: (read_calls(client, 1), client.sendall(b"HTTP/1.1 400 No\r\n\r\n")), "no D-Bus message"),
        (lambda client: (read_calls(client, 1), client.sendall(b"l\x01\0\x01" + b"\xff" * 12)), "message of"),
        (lambda client: (read_calls(client, 1), client.recv(1)), "no answer within 0.3 s"),
    ],
)  # fmt: skip
def test_a_bus_that_fails_is_an_error_that_says_how(tmp_path, behave, text):
    connection = dbus.Connection(Bus(tmp_path / "bus", behave).path, 0.3)
    with pytest.raises(dbus.DBusError, match=text):
        connection.answers(ask(connection), lambda signal: None)
    connection.close()


def test_a_bus_that_does_not_let_us_in(tmp_path):
    bus = Bus(tmp_path / "bus", lambda client: None, hello=b"REJECTED EXTERNAL\r\n")
    with pytest.raises(dbus.DBusError, match="does not let us in: REJECTED EXTERNAL"):
        dbus.Connection(bus.path, 5)


def test_no_socket_is_an_error_that_names_it(tmp_path):
    with pytest.raises(dbus.DBusError, match="absent: No such file"):
        dbus.Connection(str(tmp_path / "absent"), 5)
