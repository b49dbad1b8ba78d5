# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The target model: a tiny random Qwen3 that needs no download, or any causal LM that loads from a folder."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before transformers is imported: a job must never wait for a hub that it does not need.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from common.data import PretrainedTokenizer, Sample, TinyTokenizer, read_texts, texts_sha256, to_samples
from common.runtime import CONFIGURATION, UNAVAILABLE, Fatal

TINY = "tiny-random"
TINY_SEED = 20260101

# Of one forward pass: a bound for its memory, how much of it may be padding, and what is too little to matter.
MAX_PADDED_TOKENS = 8192
PADDING = 1.1
SMALL_TOKENS = 64


@dataclass(frozen=True)
class Target:
    """A loaded model and its tokenizer; ``layers`` are decoder layers, 0 is the first one's output (as in dflash)."""

    model: torch.nn.Module
    tokenizer: TinyTokenizer | PretrainedTokenizer
    fingerprint: str
    layers: tuple[int, ...]
    device: torch.device

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def identity(self, data_sha: str, max_length: int) -> dict[str, Any]:
        """What hidden states of this target over these samples depend on."""
        return {
            "model": self.fingerprint,
            "layers": list(self.layers),
            "data_sha256": data_sha,
            "max_length": max_length,
        }

    def mask_token(self, wanted: int | None) -> int:
        """The token that stands for a masked one: ``wanted``, else the tokenizer's; 78 when there is none."""
        size = self.model.config.get_text_config().vocab_size
        token = self.tokenizer.mask_token_id if wanted is None else wanted
        if token is None or token >= size:
            raise Fatal(
                CONFIGURATION,
                "mask_token",
                f"mask token {token}: pass --mask-token-id, a token below {size} that no text has.",
            )
        return token

    @torch.no_grad()
    def hidden_states(self, samples: list[Sample]) -> list[torch.Tensor]:
        """For each sample, in order, ``[tokens, layers · hidden]`` on this target's device, for any thread to use.

        Padding is on the right: under causal attention it cannot reach a real token.
        """
        results: list[torch.Tensor | None] = [None] * len(samples)
        for group in groups([len(sample.tokens) for sample in samples]):
            tokens, mask = padded([samples[index].tokens for index in group])
            # The base model: logits are not needed, and with a large vocabulary they cost more memory than all else.
            output = self.model.base_model(
                input_ids=tokens.to(self.device),
                attention_mask=mask.to(self.device),
                output_hidden_states=True,
                use_cache=False,
            )
            # hidden_states[0] is the embedding, hence + 1, as in dflash.model.extract_context_feature.
            features = torch.cat([output.hidden_states[layer + 1] for layer in self.layers], dim=-1)
            for row, index in enumerate(group):
                results[index] = features[row, : len(samples[index].tokens)].clone()
        if self.device.type == "cuda":
            # The kernels are only queued, on this thread's stream, and another thread reads from another stream.
            torch.cuda.current_stream(self.device).synchronize()
        return results


def groups(lengths: list[int]) -> list[list[int]]:
    """Indexes in groups that are padded to their longest: of similar length, so that little is padding."""
    found: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded_tokens = (len(found[-1]) + 1) * lengths[index] if found else 0
        if found and padded_tokens <= min(MAX_PADDED_TOKENS, PADDING * (real + lengths[index]) + SMALL_TOKENS):
            found[-1].append(index)
            real += lengths[index]
        else:
            found.append([index])
            real = lengths[index]
    return found


def padded(rows: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask ``[rows, longest]``, padded on the right."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
        mask[row, : len(values)] = 1
    return tokens, mask


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for one thread's work on ``device``, which then queues behind nobody else's; None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue what the block does on ``stream``, after what the default stream has: weights are written there."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.default_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def device_of(gpu: int | None) -> torch.device:
    """CPU for None, else that CUDA device; 69 when it is not there."""
    if gpu is None:
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise Fatal(
            UNAVAILABLE, "no_gpu", f"GPU {gpu} is not there: torch sees {count} (CUDA_VISIBLE_DEVICES {visible})."
        )
    return torch.device("cuda", gpu)


def _tiny_model(vocab_size: int) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
        model = Qwen3ForCausalLM(config)
        # transformers' default (std 0.02) makes a head whose loss stays flat: the drafter shares these two matrices.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
        torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    return model


def _fingerprint_weights(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _fingerprint_folder(path: Path) -> str:
    """From config.json, and each weight file's size and header: reading 100 GB to name a model takes minutes."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for weights in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        digest.update(f"{weights.name}:{weights.stat().st_size}".encode())
        if weights.suffix == ".safetensors":
            with open(weights, "rb") as handle:
                (size,) = struct.unpack("<Q", handle.read(8))
                digest.update(handle.read(size))
    return digest.hexdigest()


def choose_layers(wanted: str, target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """``auto`` is DFlash's own choice for this many draft layers; else ids like ``1,9,17``."""
    from dflash.model import build_target_layer_ids

    if wanted == "auto":
        chosen = build_target_layer_ids(target_layers, draft_layers)
    else:
        try:
            chosen = [int(part) for part in wanted.split(",")]
        except ValueError:
            raise Fatal(
                CONFIGURATION, "layers", f"--layers {wanted}: give auto or numbers separated by commas."
            ) from None
    if not chosen or min(chosen) < 0 or max(chosen) >= target_layers:
        raise Fatal(CONFIGURATION, "layers", f"--layers {wanted}: this target has layers 0 to {target_layers - 1}.")
    return tuple(chosen)


def load(
    target: str, data: Path, max_length: int, layers: str, draft_layers: int | None, device: torch.device
) -> tuple[Target, list[Sample], str]:
    """Target, samples and the data's sha256.  The model is loaded last: bad data must not cost minutes."""
    texts = read_texts(data)
    if target == TINY:
        tokenizer = TinyTokenizer([text for _id, text in texts])
        model = _tiny_model(tokenizer.vocab_size)
        fingerprint = _fingerprint_weights(model)
        draft_layers = draft_layers or 2
    else:
        from transformers import AutoModelForCausalLM

        path = Path(target)
        if not (path / "config.json").is_file():
            raise Fatal(
                CONFIGURATION,
                "target",
                f"--target {target}: no config.json there. Give {TINY} or a folder with a model.",
            )
        tokenizer = PretrainedTokenizer(path)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
        fingerprint = _fingerprint_folder(path)
        draft_layers = draft_layers or 5
    model.eval().requires_grad_(False).to(device)
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest and max_length > longest:
        raise Fatal(
            CONFIGURATION, "max_length", f"--max-length {max_length}: --target {target} knows {longest} positions."
        )
    chosen = choose_layers(layers, config.num_hidden_layers, draft_layers)
    identity = hashlib.sha256((fingerprint + tokenizer.fingerprint).encode()).hexdigest()
    samples = to_samples(texts, tokenizer, max_length)
    return Target(model, tokenizer, identity, chosen, device), samples, texts_sha256(texts)


def replicate(target: Target, device: torch.device) -> Target:
    """The same target on another device; the target itself where it already is there."""
    if device == target.device:
        return target
    # deepcopy takes from its memo what is copied already: each weight goes straight to its device, and never exists
    # twice on the first one.
    tensors = [*target.model.parameters(), *target.model.buffers()]
    moved = {id(tensor): tensor.detach().to(device) for tensor in tensors}
    for tensor in target.model.parameters():
        moved[id(tensor)] = torch.nn.Parameter(moved[id(tensor)], requires_grad=False)
    return replace(target, model=copy.deepcopy(target.model, moved), device=device)
