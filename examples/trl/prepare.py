#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make what a site already has: a causal LM with its tokenizer, and a data set.  Here both are tiny, and need no network.

``prepare.py FOLDER`` writes FOLDER/model and FOLDER/data: a random Qwen3, and the licence texts that every Debian has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def main(folder: Path) -> None:
    """Write both below a temporary name first: a folder that is there is whole."""
    licences = [path for path in sorted(Path("/usr/share/common-licenses").iterdir()) if not path.is_symlink()]
    texts = [part for path in licences for part in path.read_text().split("\n\n") if len(part) > 80]
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    (unfinished / "data").mkdir(parents=True)
    (unfinished / "data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = bytewise, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2048, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(unfinished / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(unfinished / "model")
    # safetensors writes for its own user alone, and to another one says that there is no such file.
    (unfinished / "model/model.safetensors").chmod(0o644)
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
