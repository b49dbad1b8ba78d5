# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module python_env around a stand-in for uv: what is made, kept, removed and refused. The real uv: tests/integration."""

import base64
import hashlib
import http.server
import io
import json
import sys
import threading
import zipfile

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dflash.launchproof.plugins.modules import python_env as module

UV = """#!{python}
import os, sys, pathlib, re
calls = pathlib.Path({log!r})
calls.write_text(calls.read_text() + " ".join(sys.argv[1:3]) + "\\n" if calls.exists() else " ".join(sys.argv[1:3]) + "\\n")
if sys.argv[1] == "venv":
    folder = pathlib.Path(sys.argv[-1])
    (folder / "lib/python3/site-packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
else:
    folder = pathlib.Path(sys.argv[sys.argv.index("--python") + 1]).parents[1]
    wanted = sys.stdin.read().split() + [a for a in sys.argv if "==" in a]
    if "broken==1" in wanted:
        sys.exit("no such package: broken, index " + os.environ.get("UV_DEFAULT_INDEX", ""))
    for line in wanted:
        name, version = line.split("==")
        (folder / f"lib/python3/site-packages/{{name}}-{{version}}.dist-info").mkdir()
"""


@pytest.fixture
def uv(tmp_path):
    path = tmp_path / "uv"
    path.write_text(UV.format(python=sys.executable, log=str(tmp_path / "calls")))
    path.chmod(0o755)
    return path


@pytest.fixture
def call(tmp_path, uv, capsys, monkeypatch):
    """Run the module: ``call(lock, **params) -> result``."""
    monkeypatch.setattr(module.os, "environ", dict(module.os.environ))

    def run(lock="a==1", check=False, **params):
        args = {
            "path": str(tmp_path / "o/venv"),
            "requirements": lock,
            "python": sys.executable,
            "uv": str(uv),
            **params,
        }
        args.update(_ansible_check_mode=check, _ansible_diff=True)
        with patch_module_args(args), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


def folders(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "o").iterdir() if not path.is_symlink())


def test_made_once_and_then_only_compared(call, tmp_path):
    first = call(imports=["json"])
    assert (
        first["changed"]
        and first["packages"] == {"a": "1"}
        and (first["diff"]["before"], first["diff"]["after"]) == ("", "a==1\n")
    )
    assert (tmp_path / "o/venv").is_symlink() and (tmp_path / "o/venv/bin/python").exists()
    calls = (tmp_path / "calls").read_text()
    second = call(imports=["json"])
    assert not second["changed"] and "diff" not in second and (tmp_path / "calls").read_text() == calls
    assert second["digest"] == first["digest"]


def test_check_mode_predicts_and_makes_nothing(call, tmp_path):
    result = call(check=True, extra_requirements=["t==2"])
    assert result["changed"] and result["packages"] == {"a": "1", "t": "2"} and "+t==2" not in result["diff"]["before"]
    assert not (tmp_path / "o").exists() and not (tmp_path / "calls").exists()
    call()
    assert not call(check=True)["changed"]
    assert call("a==2", check=True)["diff"] == {
        "before_header": str(tmp_path / "o/venv"),
        "after_header": str(tmp_path / "o/venv"),
        "before": "a==1\n",
        "after": "a==2\n",
    }


def test_the_one_before_stays_and_older_ones_go(call, tmp_path):
    made = []
    for lock in ("a==1", "a==2", "a==3"):
        call(lock)
        made.append((tmp_path / "o/venv").resolve().name)
    assert folders(tmp_path) == sorted(made[1:])


@pytest.mark.parametrize(
    ("lock", "params", "said"),
    [
        ("broken==1", {}, "no such package: broken"),
        ("a==2", {"imports": ["not_a_module"]}, "No module named 'not_a_module'"),
    ],
)
def test_a_failure_leaves_the_environment_as_it_was(call, tmp_path, lock, params, said):
    call()
    before = (tmp_path / "o/venv").resolve()
    result = call(lock, **params)
    assert result["failed"] and said in result["msg"]
    assert (tmp_path / "o/venv").resolve() == before and folders(tmp_path) == [before.name]


@pytest.mark.peers("nvitop 44")
def test_an_impostor_that_came_later_is_repaired(call, tmp_path, monkeypatch):
    monkeypatch.setattr(module.pure, "pynvml_problem", lambda folder: None)
    call("nvidia_ml_py==13")
    monkeypatch.setattr(
        module.pure, "pynvml_problem", lambda folder: None if folder.endswith("-2") else "pynvml is installed"
    )
    result = call("nvidia_ml_py==13")
    assert result["changed"] and result["problem"] == "pynvml is installed"
    assert (tmp_path / "o/venv").resolve().name.endswith("-2")


def test_a_lock_with_an_impostor_is_refused(call, tmp_path):
    result = call("nvidia_ml_py==13\npynvml==13")
    assert result["failed"] and "overwrites" in result["msg"]
    assert folders(tmp_path) == []


def test_what_is_not_ours_is_never_touched(call, tmp_path):
    (tmp_path / "o/venv").mkdir(parents=True)
    (tmp_path / "o/venv/file").write_text("mine")
    (tmp_path / "o/venv-notes").mkdir()
    for check in (True, False):
        result = call(check=check)
        assert result["failed"] and str(tmp_path / "o/venv") in result["msg"]
    assert (tmp_path / "o/venv/file").read_text() == "mine" and not (tmp_path / "calls").exists()


def test_a_folder_with_a_similar_name_is_not_removed(call, tmp_path):
    (tmp_path / "o/venv-notes").mkdir(parents=True)
    for lock in ("a==1", "a==2", "a==3"):
        call(lock)
    assert "venv-notes" in folders(tmp_path)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"lock": "a>=1"}, "not pinned"),
        ({"uv": None}, "nor uv_version"),
        ({"python": "/no/python"}, "/no/python"),
        ({"imports": ["os; print(1)"]}, "names of modules"),
        ({"uv": "/no/uv"}, "/no/uv"),
    ],
)
def test_bad_input_is_named_and_nothing_is_made(call, tmp_path, params, said):
    result = call(**params)
    assert result["failed"] and said in result["msg"]
    assert not (tmp_path / "o").exists() or folders(tmp_path) == []


def test_a_secret_of_the_index_is_not_shown(call):
    secret = "https://me:pass-w0rd@index/simple"
    result = call("broken==1", secret_environment={"UV_DEFAULT_INDEX": secret})
    assert result["failed"] and "pass-w0rd" not in json.dumps(result)


class Index:
    """A simple index over HTTP with one wheel, which wants a password."""

    def __init__(self, content: bytes):
        self.content = self.served = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                allowed = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:pass-w0rd").decode()
                page = f'<a href="/files/uv.whl#sha256={index.sha256}">uv</a>'.encode()
                body = {"/simple/uv/": page, "/files/uv.whl": index.served}.get(self.path)
                self.send_response(200 if allowed and body else 404 if allowed else 401)
                self.end_headers()
                if allowed and body:
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://me:pass-w0rd@127.0.0.1:{self.server.server_port}/simple"


@pytest.fixture
def wheel(tmp_path, uv):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.write(uv, "uv-9.9.data/scripts/uv")
    return content.getvalue()


@pytest.fixture
def index(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(module, "LIBRARY", str(tmp_path / "lib"))
    made = Index(wheel)
    yield made
    made.server.shutdown()
    made.server.server_close()


def fetching(index: Index, **changes) -> dict:
    """Parameters with which the module fetches uv from the index."""
    machine = module.platform.machine()
    params = {"uv": None, "uv_version": "9.9", "uv_sha256": {machine: index.sha256}}
    return {**params, "secret_environment": {"UV_DEFAULT_INDEX": index.url}, **changes}


def test_uv_is_fetched_once_by_its_hash(call, tmp_path, index):
    result = call(**fetching(index))
    assert result["changed"], result
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["uv-9.9"]
    index.served = b""
    assert call("a==2", **fetching(index))["changed"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gone", "is not on the index"),
        ("machine", "no hash for this machine"),
        ("password", "401"),
        ("down", "could not be fetched"),
        ("other", "does not have the declared hash"),
    ],
)
def test_a_uv_that_cannot_be_had_says_why(call, tmp_path, index, case, said):
    params = fetching(index)
    if case == "gone":
        params["uv_sha256"] = {module.platform.machine(): "0" * 64}
    if case == "machine":
        params["uv_sha256"] = {"sparc": index.sha256}
    if case == "password":
        params["secret_environment"] = {"UV_DEFAULT_INDEX": index.url.replace("pass-w0rd", "pass-wrong")}
    if case == "down":
        params["secret_environment"] = {"UV_DEFAULT_INDEX": "https://me:pass-w0rd@127.0.0.1:1/simple"}
    if case == "other":
        index.served = index.content + b"more"
    result = call(**params)
    assert result["failed"] and said in result["msg"]
    assert "pass-w" not in json.dumps(result) and not (tmp_path / "lib").exists()
