# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The only way out for text: known secret values, and what looks like one by its name, are masked.

Every emitter (evidence, events, report, JUnit, page, diff) sends its text through one ``Redactor``.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "********"

# Shorter values are part of half of all words: they are masked only where they stand as a value.
SHORT = 4
# From this length on, a value is also recognised in base64 and across a line break.
LONG = 8
# Texts whose masked form is remembered: the same words come at each look, and a dozen patterns are slow.
REMEMBERED = 512

_NAMED = re.compile(
    r"""(?ix) (?P<key> (?<![\w.-]) [\w.-]*
        (?: secret | token | password | passwd | passphrase | api_?key | access_key(?:_id)? | private_key
            # Not "Failed to set up credentials: Protocol error".
            | credentials? (?! : \s [A-Z]?[a-z]+ \s ) )
        ["']? \s* [=:] \s* )
        (?P<value> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s"',;&|)}\]]+ )"""
)
# Names that a tokenizer's configuration prints.
_NOT_SECRET = re.compile(r"(?i)(?:eos|bos|pad|unk|sep|cls|mask|special|added|next|first|last|per)_token")
_SHAPED = (
    re.compile(r"(?i)(?P<key>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})"),
    re.compile(r"(?P<key>PVEAPIToken=[^\s=]+=)(?P<value>\S+)"),
    re.compile(r"(?P<key>\b[a-z][a-z0-9+.-]{0,15}://[^\s/:@]*:)(?P<value>[^\s/@]+)(?=@)"),
    re.compile(r"(?i)(?P<key>[?&]X-Amz-(?:Signature|Security-Token|Credential)=)(?P<value>[^\s&\"']+)"),
    re.compile(r"(?P<key>\b)(?P<value>(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}))"),
    re.compile(r"(?P<key>-----BEGIN [A-Z ]*PRIVATE KEY-----)(?P<value>.*?)(?=-----END|\Z)", re.DOTALL),
)


class Redactor:
    """Masks secrets in text and in data."""

    def __init__(self, secrets: Iterable[str] | Mapping[str, str] = ()) -> None:
        """``secrets`` are the values, or a mapping of name to value; empty ones are ignored."""
        values = secrets.values() if isinstance(secrets, Mapping) else secrets
        values = {value for value in values if isinstance(value, str) and value.strip()}
        literal: set[str] = set()
        split: set[str] = set()
        short: set[str] = set()
        for value in values:
            # Each line of a multi-line value is one by itself: logs are cut at line ends.
            for part in {value, value.strip(), *(line.strip() for line in value.splitlines())}:
                if len(part) < SHORT:
                    if part and part == value.strip():
                        short.add(part)
                    continue
                literal |= _spellings(part)
                if LONG <= len(part) <= 512 and "\n" not in part:
                    split.add(part)
        # Longest first, so that no part of a longer secret is left over.
        alternatives = [re.escape(text) for text in sorted(literal, key=lambda text: (-len(text), text))]
        alternatives += [_across_lines(text) for text in sorted(split, key=lambda text: (-len(text), text))]
        self._known = re.compile("|".join(alternatives)) if alternatives else None
        words = "|".join(re.escape(text) for text in sorted(short, key=lambda text: (-len(text), text)))
        self._short = re.compile(rf"""(?P<key>[=:]\s*["']?)(?:{words})(?![\w.])""") if words else None
        self._masked = functools.lru_cache(maxsize=REMEMBERED)(self._mask)

    def text(self, text: str) -> str:
        """Return the text with every secret masked."""
        return self._masked(text)

    def _mask(self, text: str) -> str:
        if self._known:
            text = self._known.sub(MASK, text)
        if self._short:
            text = self._short.sub(rf"\g<key>{MASK}", text)
        text = _NAMED.sub(_mask_named, text)
        for shape in _SHAPED:
            text = shape.sub(rf"\g<key>{MASK}", text)
        return text

    __call__ = text

    def data(self, value: Any) -> Any:
        """Return plain data with every text in it masked, keys included; tuples become lists, as in JSON."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.data(key): self._entry(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.data(item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self._known:
            return MASK if self._known.fullmatch(str(value)) else value
        return value

    def _entry(self, key: Any, item: Any) -> Any:
        # {"token": "x"} holds the name and the value apart, where no pattern over text would see them together.
        if isinstance(key, str) and isinstance(item, str) and item and self._names_secret(key):
            return MASK
        return self.data(item)

    @staticmethod
    @functools.lru_cache(maxsize=REMEMBERED)
    def _names_secret(key: str) -> bool:
        return bool(_NAMED.fullmatch(f"{key}=x")) and not _NOT_SECRET.search(key)


def _mask_named(match: re.Match[str]) -> str:
    if _NOT_SECRET.search(match["key"]):
        return match[0]
    mark = match["value"][0] if match["value"][0] in "\"'" else ""
    return f"{match['key']}{mark}{MASK}{mark}"


def _spellings(value: str) -> set[str]:
    """Return the ways in which a value may be written by what handles it."""
    spellings = {
        value,
        quote(value, safe=""),
        quote(value),
        quote_plus(value),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        # YAML and Python in single quotes, a shell in single quotes, and text in HTML or XML.
        value.replace("'", "''"),
        value.replace("'", "'\\''"),
        repr(value)[1:-1],
        value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
    }
    # Escaped twice: JSON inside JSON, as in an event that carries a module's output.
    spellings.add(json.dumps(json.dumps(value))[3:-3])
    raw = value.encode("utf-8", "surrogateescape")
    if len(raw) >= LONG:
        spellings |= {raw.hex(), raw.hex().upper()}
        # A value inside a longer text may start at each of the three places of base64's grid; its ends share characters
        # with their neighbours, so those are left off.
        for shift in range(3):
            skip = (0, 2, 3)[shift]
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                text = encode(b"\0" * shift + raw).decode("ascii").rstrip("=")
                spare = (len(raw) + shift) % 3
                spellings.add(text[skip : len(text) - (1 if spare else 0)])
    return {text for text in spellings if len(text) >= SHORT}


def _across_lines(value: str) -> str:
    return r"(?:\\?[\r\n]+)?".join(re.escape(character) for character in value)
