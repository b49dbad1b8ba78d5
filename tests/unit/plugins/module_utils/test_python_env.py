# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Locks, index pages, environments on disk and NVML, as module python_env sees them."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.dflash.launchproof.plugins.module_utils import python_env as pure

ROOT = Path(__file__).parents[4]
HASH = "a" * 64


@pytest.mark.parametrize(
    ("text", "extra", "packages"),
    [
        ("a==1\nB_c.d==2.0 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n", [], {"a": "1", "b-c-d": "2.0"}),
        (
            "# comment\n\na==1 ; python_version < '3.12'  # why\nb[x,y]==2\n",
            ["torch==2.13.0+cpu"],
            {"a": "1", "b": "2", "torch": "2.13.0+cpu"},
        ),
        ("", ["a==1"], {"a": "1"}),
    ],
)
def test_a_lock_is_read(text, extra, packages):
    assert pure.locked(text, extra) == packages
    assert list(pure.locked(text, extra)) == sorted(packages)


@pytest.mark.parametrize(
    ("text", "extra", "said"),
    [
        ("a>=1\n", [], "'a>=1'"),
        ("a==1\nb\n", [], "'b'"),
        ("-r other.txt\n", [], "-r other.txt"),
        ("a @ https://x/a.whl\n", [], "a @"),
        ("a==1\n", ["torch"], "'torch'"),
        ("a==1.*\n", [], "a==1.*"),
    ],
)
def test_what_is_not_pinned_is_refused_by_name(text, extra, said):
    with pytest.raises(pure.EnvError) as caught:
        pure.locked(text, extra)
    assert said in str(caught.value)


def test_the_digest_depends_on_everything_an_environment_is_made_from():
    base = ("a==1\n", ["t==1"], "/usr/bin/python3.11", None)
    others = [
        ("a==2\n", *base[1:]), (base[0], ["t==2"], *base[2:]), (*base[:2], "/usr/bin/python3.12", None), (*base[:3], "/opt/torch"),
    ]  # fmt: skip
    assert len({pure.digest(*parts) for parts in [base, *others]}) == 5
    assert pure.digest(*base) == pure.digest(*base)


def test_a_wheel_is_found_by_its_hash_wherever_the_index_keeps_it():
    page = (
        '<a href="../../files/uv-1-win.whl#sha256=' + "b" * 64 + '">x</a><a>no address</a>'
        f'<a data-x="1" href="../../files/uv-1-linux.whl#sha256={HASH}">uv</a>'
    )
    assert pure.find_link(page, "https://host/simple/uv/", HASH) == "https://host/files/uv-1-linux.whl"
    assert pure.find_link(page, "https://host/simple/uv/", "c" * 64) is None


def test_an_address_is_shown_without_its_password():
    shown, headers = pure.split_credentials("https://me:a%40b@host:8/simple?x=1")
    assert shown == "https://host:8/simple?x=1"
    assert base64.b64decode(headers["Authorization"].split()[1]) == b"me:a@b"
    assert pure.split_credentials("https://host/simple") == ("https://host/simple", {})


def environment(folder: Path, pynvml=b"real", recorded=b"real", others=()) -> Path:
    site = folder / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to("/bin/sh")
    info = site / "nvidia_ml_py-13.1.dist-info"
    info.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"pynvml.py,sha256={digest},4\n")
    (site / "pynvml.py").write_bytes(pynvml)
    for name in others:
        (site / f"{name}.dist-info").mkdir()
    return folder


def test_distributions_have_their_canonical_names(tmp_path):
    made = environment(tmp_path / "e", others=["PyYAML-6.0", "zope.interface-7.1"])
    assert pure.distributions(str(made)) == {"nvidia-ml-py": "13.1", "pyyaml": "6.0", "zope-interface": "7.1"}
    assert pure.distributions(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({}, None),
        ({"others": ["pynvml-13.0"]}, "pynvml is installed"),
        ({"others": ["nvidia_ml_py3-7.352"]}, "nvidia-ml-py3 is installed"),
        ({"pynvml": b"overwritten"}, "not the file that nvidia-ml-py installed"),
    ],
)
def test_import_pynvml_is_nvidia_ml_pys_or_the_reason_is_named(tmp_path, made, problem):
    found = pure.pynvml_problem(str(environment(tmp_path / "e", **made)))
    assert (found is None) if problem is None else (problem in found)


def test_without_nvidia_ml_py_or_its_file_that_is_the_reason(tmp_path):
    made = environment(tmp_path / "e")
    (made / "lib/python3.11/site-packages/pynvml.py").unlink()
    assert "No such file" in pure.pynvml_problem(str(made))
    assert pure.pynvml_problem(str(tmp_path / "none")) == "nvidia-ml-py is not installed"


def test_what_lies_there_is_absent_ours_or_foreign(tmp_path):
    path = tmp_path / "venv"
    assert pure.look(str(path)) == pure.Found("absent")
    path.mkdir()
    assert pure.look(str(path)).kind == "foreign"
    path.rmdir()
    path.symlink_to("elsewhere")
    assert pure.look(str(path)).kind == "foreign"
    path.unlink()
    path.symlink_to("venv-abc-1")
    assert pure.look(str(path)).problem
    made = environment(tmp_path / "venv-abc-1")
    assert "never finished" in pure.look(str(path)).problem
    (made / pure.MARKER).write_text(json.dumps({"digest": HASH}))
    assert pure.look(str(path)) == pure.Found("ours", str(made), HASH, None)
    (made / "bin/python").unlink()
    assert "interpreter" in pure.look(str(path)).problem
    (made / pure.MARKER).write_text("{")
    assert "marker" in pure.look(str(path)).problem


class Library:
    """The NVML reader with chosen answers."""

    def __init__(self, error=None, devices=2, problems=()):
        self.error, self.driver = error, None if error else "580.1"
        self.devices, self.problems, self.closed = dict.fromkeys(range(devices)), list(problems), False

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("library", "state", "why"),
    [
        (Library(), "nvml", None),
        (Library(error="nvmlInit_v2: Driver Not Loaded (9)", devices=0), "off", "Driver Not Loaded (9)"),
        (Library(devices=0), "off", "sees no GPU"),
        (Library(devices=0, problems=["GPU 0 of 1: GPU is lost"]), "off", "GPU is lost"),
    ],
)
def test_telemetry_is_on_or_says_why_not(monkeypatch, library, state, why):
    monkeypatch.setattr(pure, "Nvml", lambda: library)
    found = pure.nvml(initialise=True)
    assert found["state"] == state and (found["why"] is None if why is None else why in found["why"])
    assert found["gpus"] == len(library.devices) and library.closed


def test_nvml_is_not_started_in_check_mode(monkeypatch):
    monkeypatch.setattr(pure, "Nvml", lambda: pytest.fail("it was started"))
    assert pure.nvml(initialise=False)["state"] == "unknown"


@pytest.mark.parametrize(
    ("said", "wanted", "problem"),
    [
        ({"gpus": ["GPU-aa", "GPU-bb"]}, ["GPU-bb", "0"], None),
        ({"gpus": ["GPU-aa"]}, ["GPU-bb", "1"], "does not see GPU-bb, 1; it sees GPU-aa"),
        ({"gpus": []}, ["0"], "it sees none"),
        ({"error": "ModuleNotFoundError: No module named 'pynvml'"}, ["0"], "No module named"),
    ],
)
def test_gpus_that_the_environment_has_to_see(said, wanted, problem):
    found = pure.unseen(said, wanted)
    assert found is None if problem is None else problem in found


def test_the_packages_of_a_base_can_be_imported(tmp_path):
    for name in ("env", "base"):
        (tmp_path / name / "lib/python3.11/site-packages").mkdir(parents=True)
    pure.link_base(str(tmp_path / "env"), str(tmp_path / "base"))
    link = tmp_path / "env/lib/python3.11/site-packages/launchproof_base.pth"
    assert link.read_text() == f"{tmp_path}/base/lib/python3.11/site-packages\n"


def test_a_base_of_another_python_is_refused(tmp_path):
    (tmp_path / "env/lib/python3.11/site-packages").mkdir(parents=True)
    (tmp_path / "base/lib/python3.12/site-packages").mkdir(parents=True)
    with pytest.raises(pure.EnvError, match=r"no lib/python3\.11/site-packages"):
        pure.link_base(str(tmp_path / "env"), str(tmp_path / "base"))


def test_the_shipped_lock_is_complete_and_hashed():
    text = (ROOT / "workload/requirements.lock").read_text()
    defaults = yaml.safe_load((ROOT / "roles/python_env/defaults/main.yml").read_text())
    packages = pure.locked(text, defaults["python_env_extra_requirements"])
    asked = [line for line in (ROOT / "workload/requirements.in").read_text().splitlines() if line and line[0] != "#"]
    for line in asked:
        name, _equals, version = line.partition("==")
        assert pure.normalize(name) in packages and version in ("", packages[pure.normalize(name)])
    logical = text.replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in line for line in logical if "==" in line)
    assert not set(pure.IMPOSTORS) & set(packages)
    assert "file:" not in text and "find-links" not in text
    assert all(len(value) == 64 for value in defaults["python_env_uv_sha256"].values())
