# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference programs, with real torch, a real S3 server (rclone) and real processes.

They have their own environment: workload/requirements.lock, torch and requirements/workload-test.txt.
"""

import io
import os
import sys

import pytest

from tests.support.preloaded import fork, fork_server, moments  # noqa: F401 - fixtures
from tests.support.workload import WORKLOAD, s3, start, start_s3, stop  # noqa: F401 - fixtures, and what tests import

sys.path.insert(0, str(WORKLOAD))
# As the programs do: nothing here may ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def here():
    """Run a program's body in this process, without its signals and its exit: ``here(module, argv) -> (fields, output)``."""
    from common.runtime import Job

    def call(module, argv: list):
        job = Job(None, out=io.StringIO())
        args = module.parser().parse_args([str(arg) for arg in argv])
        try:
            return module.body(job, args), job._out
        finally:
            job._finished.set()

    return call


def phases_at_steps(monkeypatch) -> list[str]:
    """A list that grows with each real step, by the phase that the step found."""
    from common.runtime import Job

    phases, step = [], Job.step

    def noted(self, *args, **fields):
        phases.append(self.progress.phase)
        return step(self, *args, **fields)

    monkeypatch.setattr(Job, "step", noted)
    return phases


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A small folder of texts: 60 paragraphs of 3 to 60 words, some of them longer than one piece of 64 tokens."""
    folder = tmp_path_factory.mktemp("texts")
    sentence = "the licence grants each recipient a right to copy modify and convey the covered work under these terms"
    words = sentence.split()
    for name in ("a", "b", "c"):
        paragraphs = [" ".join(words[(n + k) % len(words)] for k in range(3 + n * 3)) for n in range(20)]
        (folder / name).write_text("\n\n".join(f"{name} {n} {text}" for n, text in enumerate(paragraphs)))
    return folder
