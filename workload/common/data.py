# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts to token samples, the same in every process that reads the same data with the same target."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.runtime import BAD_DATA, Fatal

PAD, EOS, MASK = "<pad>", "<eos>", "<mask>"
TINY_VOCABULARY = 1024


class Tokenizer(Protocol):
    """What the jobs need of a tokenizer."""

    vocab_size: int
    fingerprint: str

    def encode(self, texts: list[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Sample:
    """A stable id and at least one token."""

    id: str
    tokens: tuple[int, ...]


def _paragraphs(folder: Path) -> Iterator[tuple[str, str]]:
    # Debian's licence folder names each text twice (GPL -> GPL-3): a link is no second text.
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
    ]
    for path in files:
        blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace"))
        for number, text in enumerate(filter(None, (block.strip() for block in blocks)), start=1):
            yield f"{path.name}:{number:04d}", text


def _jsonl(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record.get("text")
                if text is None:
                    text = "\n".join(str(turn["content"]) for turn in record["messages"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Fatal(
                    BAD_DATA,
                    "bad_data",
                    f"{path} line {number}: neither a JSON object with text nor one with messages ({error!r}).",
                ) from None
            if text.strip():
                yield str(record.get("id", f"line:{number:08d}")), text


def read_texts(path: Path) -> list[tuple[str, str]]:
    """(id, text) pairs: paragraphs of a folder's files, or a JSONL file's ``text`` or ``messages``; ids are unique."""
    try:
        texts = list(_paragraphs(path) if path.is_dir() else _jsonl(path))
    except (OSError, UnicodeDecodeError) as error:
        raise Fatal(
            BAD_DATA, "bad_data", f"--data {path}: {error}. Give a JSONL file or a folder of text files."
        ) from None
    if not texts:
        raise Fatal(BAD_DATA, "bad_data", f"--data {path}: no text in it.")
    seen: set[str] = set()
    for identifier, _text in texts:
        if identifier in seen:
            raise Fatal(BAD_DATA, "bad_data", f"--data {path}: sample id {identifier} appears twice.")
        seen.add(identifier)
    return texts


def texts_sha256(texts: list[tuple[str, str]]) -> str:
    """The identity of the data: ids and texts in order."""
    digest = hashlib.sha256()
    for pair in texts:
        digest.update(json.dumps(pair).encode())
    return digest.hexdigest()


def to_samples(texts: list[tuple[str, str]], tokenizer: Tokenizer, max_length: int) -> list[Sample]:
    """Encode; what is longer than ``max_length`` tokens is cut into pieces ``id+1``, ``id+2``, …"""
    samples = []
    for (identifier, _text), tokens in zip(texts, tokenizer.encode([text for _id, text in texts]), strict=True):
        for piece, start in enumerate(range(0, len(tokens), max_length)):
            name = identifier if piece == 0 else f"{identifier}+{piece}"
            samples.append(Sample(name, tuple(tokens[start : start + max_length])))
    return samples


class TinyTokenizer:
    """A byte-level BPE of 1024 entries, trained on the data itself in 0.1 s: no download, the same on every run."""

    def __init__(self, texts: list[str]):
        from tokenizers import Tokenizer as Bpe
        from tokenizers import models, pre_tokenizers, trainers

        self._bpe = Bpe(models.BPE())
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=TINY_VOCABULARY,
            special_tokens=[PAD, EOS, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self._bpe.train_from_iterator(texts, trainer)
        self.vocab_size = TINY_VOCABULARY
        self.mask_token_id = self._bpe.token_to_id(MASK)
        self.fingerprint = hashlib.sha256(self._bpe.to_str().encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [encoding.ids for encoding in self._bpe.encode_batch(texts)]


class PretrainedTokenizer:
    """The tokenizer beside a local model."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.vocab_size = len(self._tokenizer)
        self.mask_token_id = self._tokenizer.mask_token_id
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        self.fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]
