# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Extraction from any causal LM that transformers loads from a folder: the states are the model's own."""

import extract_hidden_states as program
import pytest
import torch
import train_dflash_pipeline as training
from common import store as stores
from common import target as targets
from common.data import Sample
from common.runtime import Fatal
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tests.unit.workload.test_extract import everything

SHAPE = {
    "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": lambda size: LlamaConfig(vocab_size=size, num_key_value_heads=2, **SHAPE),
    "qwen2-tied": lambda size: Qwen2Config(
        vocab_size=size, num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=False, **SHAPE
    ),
    "gpt-neox": lambda size: GPTNeoXConfig(vocab_size=size, rotary_pct=0.5, **SHAPE),
    "gpt2": lambda size: GPT2Config(vocab_size=size, n_embd=48, n_layer=5, n_head=4, n_positions=64),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, texts, tmp_path_factory):
    """A model with random weights and a tokenizer, as save_pretrained leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<mask>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([path.read_text() for path in sorted(texts.iterdir())], trainer)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", mask_token="<mask>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(FAMILIES[request.param](len(tokenizer))).save_pretrained(folder)
    return folder


@pytest.mark.shows("W27", "W25")
def test_the_states_are_the_models_own(here, texts, tmp_path, folder):
    argv = ["--target", folder, "--data", texts, "--out-dir", tmp_path / "out", "--run-id", "r", "--max-length", "48"]
    fields, _output = here(program, [*argv, "--layers", "0,2,4"])
    assert fields["reason"] == "done"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = everything(stores.LocalStore(tmp_path / "out"))
    assert len(found) > 60
    for tokens, states in found.values():
        own = model(tokens[None].long(), output_hidden_states=True).hidden_states
        # The last layer's are after the final norm: that is what the model itself calls its last hidden state.
        wanted = torch.cat([own[1][0], own[3][0], own[5][0]], dim=-1)
        torch.testing.assert_close(states.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.shows("W27")
def test_a_drafter_is_trained_on_it(here, texts, tmp_path, folder):
    argv = ["--target", folder, "--data", texts, "--ckpt-dir", tmp_path, "--max-length", "48", "--max-steps", "3"]
    assert here(training, [*argv, "--draft-layers", "2", "--min-ready", "8", "--max-depth", "24"])[0]["step"] == 3


def test_more_positions_than_the_model_knows_are_78(here, texts, tmp_path, folder):
    with pytest.raises(Fatal) as caught:
        here(program, ["--target", folder, "--data", texts, "--out-dir", tmp_path / "out", "--max-length", "65"])
    assert caught.value.code == 78 and "64 positions" in str(caught.value)


@pytest.mark.shows("W29")
def test_other_weights_are_another_model(folder, tmp_path, texts):
    def identity(path) -> str:
        return targets.load(str(path), texts, 48, "0", None, torch.device("cpu"))[0].fingerprint

    before = identity(folder)
    assert identity(folder) == before
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.bos_token_id = 7
    model.save_pretrained(tmp_path)
    for path in folder.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert identity(tmp_path) != before


@pytest.mark.parametrize("lengths", [[5], [1, 2, 3, 200], [7] * 40, [512] * 40, list(range(1, 300))])
def test_groups_hold_every_sample_once_and_little_padding(lengths):
    groups = targets.groups(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert len(group) * longest <= max(
            longest, min(targets.MAX_PADDED_TOKENS, 1.1 * sum(lengths[index] for index in group) + 64)
        )


def test_a_sample_means_the_same_alone_and_in_a_batch(folder, texts):
    target = targets.load(str(folder), texts, 48, "0,3", None, torch.device("cpu"))[0]
    samples = [Sample(str(n), tuple(3 + (n * 5 + k) % 200 for k in range(n))) for n in (1, 4, 9, 30)]
    together = target.hidden_states(samples)
    for sample, states in zip(samples, together, strict=True):
        torch.testing.assert_close(states, target.hidden_states([sample])[0], rtol=1e-4, atol=1e-4)
