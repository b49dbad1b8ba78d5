# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Following a log on a real file system with real inotify: what counts is what this run wrote."""

from __future__ import annotations

import os
import socket
import time

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import logfile, process
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop


class Reader:
    """A Tail with its loop, and what came out of it."""

    def __init__(self, path, start=None, skip_middle=False):
        self.loop, self.data, self.calls = Loop(), b"", 0
        self.tail = logfile.Tail(str(path), start, self.loop, self.called, skip_middle)

    def called(self):
        self.calls += 1

    def feed(self, data):
        assert len(data) <= logfile.PIECE
        self.data += data

    def read(self):
        """Wait for an event, then read to the end."""
        while self.loop.step(0.2 if not self.calls else 0):
            pass
        woken, self.calls = self.calls, 0
        while self.tail.read(self.feed):
            pass
        data, self.data = self.data, b""
        return data, bool(woken)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def reader(log):
    log.write_bytes(b"")
    found = Reader(log)
    yield found
    found.tail.close()
    found.loop.close()


def append(path, data):
    with open(path, "ab") as handle:
        handle.write(data)


def test_what_is_appended_wakes_and_is_read_once(log, reader):
    append(log, b"one\n")
    assert reader.read() == (b"one\n", True)
    append(log, b"two\n")
    assert reader.read() == (b"two\n", True)
    assert reader.read() == (b"", False)


def test_bytes_before_the_baseline_are_not_this_runs(log):
    log.write_bytes(b"old\n")
    reader = Reader(log, logfile.identity(str(log)))
    append(log, b"new\n")
    assert reader.read()[0] == b"new\n"
    assert logfile.old_bytes(str(log), (*reader.tail.inode, 4)) == b"old\n"


def test_another_file_of_that_name_is_this_runs_from_its_first_byte(log):
    log.write_bytes(b"old line\n")
    start = logfile.identity(str(log))
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"new\n")
    assert Reader(log, start).read()[0] == b"new\n"


def test_rename_and_create_as_logrotate_does(log, reader):
    append(log, b"one\n")
    reader.read()
    with open(log, "ab") as old:
        log.rename(log.with_suffix(".1"))
        old.write(b"late\n")
        old.flush()
        assert reader.read()[0] == b"late\n", "the writer has not reopened yet"
        log.write_bytes(b"fresh\n")
    assert reader.read() == (b"fresh\n", True)
    assert reader.tail.change == "renamed"


def test_truncation_starts_again_at_the_top(log, reader):
    append(log, b"a long first line\n")
    reader.read()
    os.truncate(log, 0)
    append(log, b"short\n")
    assert reader.read()[0] == b"short\n"
    assert reader.tail.change == "truncated"


def test_a_log_that_was_emptied_and_refilled_between_two_looks_starts_again_at_the_top(log, reader):
    append(log, b"".join(b"old %d\n" % i for i in range(50)))
    reader.read()
    new = b"".join(b"new %d\n" % i for i in range(90))
    log.write_bytes(new)
    assert reader.read()[0] == new
    assert reader.tail.change == "truncated"


def test_a_log_that_is_written_over_is_read_as_far_as_the_writer_has_come(log):
    log.write_bytes(b"old line\n" * 9)
    reader = Reader(log, logfile.identity(str(log)))
    with open(log, "r+b", buffering=0) as handle:
        for line in (b"new 1\n", b"new 2\n"):
            handle.write(line)
            place = process.place(os.getpid(), reader.tail.inode)
            assert reader.tail.unchanged and place == handle.tell() and process.holds(os.getpid(), reader.tail.inode)
            reader.tail.overwritten(place)
            assert reader.read()[0] == line
        handle.write(b"new line\n" * 9)
        reader.tail.overwritten(process.place(os.getpid(), reader.tail.inode))
        assert reader.read()[0] == b"new line\n" * 9
    with open(log, "ab", buffering=0) as handle:
        handle.write(b"appended\n")
        assert process.place(os.getpid(), reader.tail.inode) == 0


def bind(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkdir, "folder"),
        (os.mkfifo, "fifo"),
        (bind, "socket"),
        (lambda path: os.symlink("/dev/null", path), "device"),
        (lambda path: None, ""),
    ],
)
def test_what_is_no_file_is_no_log(log, make, kind):
    make(log)
    reader = Reader(log, logfile.identity(str(log)))
    assert not reader.tail.exists and reader.read()[0] == b"" and reader.tail.kind == kind


def test_links_that_lead_to_each_other_are_no_missing_right(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    path = str(tmp_path / "a")
    assert logfile.identity(path) is None
    reader = Reader(path)
    assert (reader.tail.error, reader.tail.exists) == ("", False)
    assert logfile.probe_place(path, "").error == "ELOOP"
    reader.tail.close()
    reader.loop.close()


def test_what_was_written_since_it_was_emptied_can_be_read_again(log, reader):
    append(log, b"old\n")
    reader.read()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert reader.tail.emptied_at < before
    os.truncate(log, 0)
    append(log, b"a\n")
    assert reader.read()[0] == b"a\n"
    assert reader.tail.emptied_at > before
    append(log, b"b\n")
    reader.tail.rewind()
    assert reader.read()[0] == b"a\nb\n"


def test_the_hole_that_copytruncate_leaves_is_skipped_unread(log, reader):
    size = 1 << 30
    with open(log, "wb") as handle:
        handle.write(b"x" * 100)
        handle.flush()
        reader.read()
        os.truncate(log, 0)
        handle.seek(size)
        handle.write(b"after\n")
    data = reader.read()[0]
    assert data.strip(b"\0") == b"after\n"
    assert reader.tail.read_bytes < 1 << 20


def test_a_deleted_log_is_read_on_and_its_successor_found(log, reader):
    with open(log, "ab", buffering=0) as handle:
        handle.write(b"one\n")
        reader.read()
        log.unlink()
        handle.write(b"two\n")
        assert reader.read()[0] == b"two\n"
        assert reader.tail.change == "deleted"
    log.write_bytes(b"three\n")
    assert reader.read() == (b"three\n", True)


def test_a_log_and_its_folder_may_come_later(tmp_path):
    path = tmp_path / "a" / "b" / "log"
    reader = Reader(path)
    assert reader.read() == (b"", False)
    path.parent.mkdir(parents=True)
    assert reader.read()[1]
    path.write_bytes(b"here\n")
    assert reader.read() == (b"here\n", True)


def test_the_path_may_lead_through_a_link_that_is_swapped(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_bytes(name.encode())
    current = tmp_path / "current"
    current.symlink_to("a")
    reader = Reader(current / "log")
    assert reader.read()[0] == b"a"
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").rename(current)
    assert reader.read()[0] == b"b"


def test_of_a_large_log_that_was_there_the_middle_is_left_out(log):
    size = logfile.HEAD + logfile.TAIL + (4 << 20)
    log.write_bytes(b"first\n" + b"x" * (size - 12) + b"\nlast\n")
    reader = Reader(log, skip_middle=True)
    data = reader.read()[0]
    assert data.startswith(b"first\n") and data.endswith(b"\nlast\n")
    assert reader.tail.read_bytes <= logfile.HEAD + logfile.TAIL + logfile.PIECE


def test_the_last_lines_of_another_file_are_those_of_this_run(tmp_path):
    path, now = tmp_path / "err", time.clock_gettime(time.CLOCK_BOOTTIME)
    path.write_text("x" * 9000 + "\none\n\ntwo\n")
    assert logfile.last_lines(str(path), now - 1)[-2:] == ("one", "two")
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert logfile.last_lines(str(path), now - 1) == (), "of a run before"
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "absent", "."):
        assert logfile.last_lines(str(tmp_path / name), now - 1) == ()


def test_a_write_is_tried_where_the_log_is(tmp_path):
    assert logfile.probe_place(str(tmp_path / "log"), "").error == ""
    assert logfile.probe_place(str(tmp_path / "none" / "log"), "").error == "ENOENT"
    (tmp_path / "file").write_text("")
    assert logfile.probe_place(str(tmp_path / "file" / "log"), "").error == "ENOTDIR"
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "the probe leaves nothing behind"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which is root's alone")
def test_the_write_is_tried_as_the_jobs_user(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    place = logfile.probe_place(str(folder / "log"), "nobody")
    assert (place.error, place.user) == ("EACCES", "nobody")
    assert logfile.probe_place(str(folder / "log"), "root").error == ""


def test_a_folder_that_takes_no_new_files_is_fine_where_the_log_itself_is_writable(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("becomes another user, which is root's alone")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    log = tmp_path / "log"
    log.touch()
    log.chmod(0o666)
    assert logfile.probe_place(str(log), "nobody").error == ""
