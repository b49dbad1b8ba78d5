# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No secret gets out, however it was written, and what is none stays readable."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote, quote_plus

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.redact import MASK, Redactor
from hypothesis import assume, given
from hypothesis import strategies as st

SECRET = "s3cr3t/Val+ue'\"x&y ü"
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE\nAAAABG5vbmUAAAAEbm9uZQ\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        json.dumps(json.dumps(SECRET)),
        repr(SECRET),
        SECRET.replace("'", "'\\''"),
        SECRET[:7] + "\n" + SECRET[7:],
        SECRET[:7] + "\\\n" + SECRET[7:],
        SECRET.encode().hex(),
        base64.b64encode(SECRET.encode()).decode(),
        base64.b64encode(b"user:" + SECRET.encode() + b":more").decode(),
        base64.urlsafe_b64encode(b"u:" + SECRET.encode()).decode(),
    ],
)
def test_every_spelling_is_masked(written: str) -> None:
    out = Redactor([SECRET]).text(f"before {written} after")
    assert MASK in out and out.startswith("before ") and out.endswith(" after")
    for size in (8, 6):
        assert not any(written[at : at + size] in out for at in range(4, len(written) - size - 4))


@given(st.text(min_size=4, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_a_known_value_never_gets_out(secret: str, before: str, after: str) -> None:
    assume(
        secret.strip()
        and len(secret.strip()) >= 4
        and MASK not in secret
        and secret not in MASK
        and set(secret) != {"*"}
    )
    assume(not any(secret in MASK * 2 + text or secret in text + MASK * 2 for text in (before, after)))
    redactor = Redactor([secret])
    out = redactor.text(f"{before}|{secret}|{after}")
    assert secret not in out
    assert secret not in json.loads(json.dumps(redactor.data({"a": [f"x|{secret}|y"]})))["a"][0]


def test_each_line_of_a_long_secret_is_one() -> None:
    out = Redactor([PEM]).text("log: AAAABG5vbmUAAAAEbm9uZQ then more")
    assert out == f"log: {MASK} then more"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("AWS_SECRET_ACCESS_KEY=abc/def+ghi x", "abc/def"),
        ("export HF_TOKEN='tok en' x", "tok en"),
        ('{"api_key": "k-123", "n": 1}', "k-123"),
        ("password: hunter2, next", "hunter2"),
        ("Authorization: Bearer abcdefgh.ijkl", "abcdefgh"),
        ("Authorization: PVEAPIToken=root@pam!ci=11-22-33", "11-22-33"),
        ("https://user:pa55@host/x", "pa55"),
        ("GET /b?X-Amz-Signature=deadbeef&x=1", "deadbeef"),
        ("using hf_abcdefghijklmnopqrstuvwxyz now", "hf_abcdefghij"),
        (PEM, "b3BlbnNzaC1rZXktdjE"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, gone: str) -> None:
    out = Redactor().text(text)
    assert gone not in out and MASK in out


@pytest.mark.parametrize(
    "text",
    [
        "ev=step step=12 tokens=4096 tokens_per_s=9.5 max_tokens=2048",
        "eos_token='<|end|>' pad_token_id: 151643 next_token=5",
        "loading s3://bucket/prefix from https://host:443/path",
        "secretary=ann; passwords are not printed; tokenizer=qwen",
        "ERROR: 13 of 64 shards",
        "Failed to determine user credentials: No such process",
        "Failed to set up credentials: Protocol error",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor(["correct-horse"]).text(text) == text


def test_short_secrets_are_masked_as_values_only() -> None:
    redactor = Redactor(["ab", ""])
    assert redactor.text("cab ab PIN=ab pin: 'ab' x=abc") == f"cab ab PIN={MASK} pin: '{MASK}' x=abc"
    assert redactor.text("") == ""


def test_data() -> None:
    redactor = Redactor({"DB": "correct-horse", "PIN": "123456"})
    data = {
        "token": "x",
        "env": {"A": "correct-horse"},
        "list": ("a correct-horse",),
        "n": 123456,
        "k": 7,
        "none": None,
        "yes": True,
    }
    assert redactor.data(data) == {
        "token": MASK, "env": {"A": MASK}, "list": [f"a {MASK}"], "n": MASK, "k": 7, "none": None, "yes": True,
    }  # fmt: skip
    assert redactor.data({"correct-horse": 1}) == {MASK: 1}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_any_data_keeps_its_shape(data: object) -> None:
    out = Redactor(["correct-horse"]).data(data)
    assert type(out) is type(data) and json.dumps(out)


def test_long_lines_are_cheap() -> None:
    # A quadratic pattern takes minutes here, the linear ones half a second.
    redactor, began = Redactor([SECRET]), time.process_time()
    for text in ("a." * 50_000, "a-" * 50_000, "a" * 100_000, "=" * 100_000, "token" * 20_000, "://" * 30_000):
        redactor.text(text)
    assert time.process_time() - began < 10
