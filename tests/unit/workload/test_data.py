# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts to samples."""

import json

import pytest
from common.data import TinyTokenizer, read_texts, texts_sha256, to_samples
from common.runtime import Fatal


@pytest.mark.shows("W43")
def test_a_folder_gives_paragraphs_and_no_links(tmp_path):
    (tmp_path / "b").write_text("one\n\n\n two\nlines \n\n")
    (tmp_path / "a").write_text("first")
    (tmp_path / "c").symlink_to("b")
    (tmp_path / ".hidden").write_text("no")
    assert read_texts(tmp_path) == [("a:0001", "first"), ("b:0001", "one"), ("b:0002", "two\nlines")]


@pytest.mark.shows("W43")
def test_jsonl_gives_text_or_messages(tmp_path):
    path = tmp_path / "x.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    path.write_text("\n".join(map(json.dumps, [{"id": "q", "text": "one"}, {"text": "two"}, {"messages": turns}])))
    assert read_texts(path) == [("q", "one"), ("line:00000002", "two"), ("line:00000003", "hi\nthere")]


@pytest.mark.shows("W14")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "x"}\nnot json\n', "line 2"),
        ('{"other": 1}\n', "line 1"),
        ("[1]\n", "line 1"),
        ('{"id": 1, "text": "x"}\n{"id": 1, "text": "y"}\n', "appears twice"),
        ("\n", "no text"),
    ],
)
def test_bad_data_is_65_and_says_where(tmp_path, content, said):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(Fatal) as caught:
        read_texts(path)
    assert caught.value.code == 65 and said in str(caught.value) and str(path) in str(caught.value)


def test_data_that_is_not_there_is_65(tmp_path):
    with pytest.raises(Fatal) as caught:
        read_texts(tmp_path / "gone")
    assert caught.value.code == 65


def test_the_tiny_tokenizer_is_the_same_every_time_and_loses_nothing(texts):
    contents = [text for _id, text in read_texts(texts)]
    one, two = TinyTokenizer(contents), TinyTokenizer(contents)
    assert one.fingerprint == two.fingerprint
    assert one.encode(contents) == two.encode(contents)
    assert one._bpe.decode(one.encode(["ein Wort, das es nicht gibt: ß"])[0]).replace("Ġ", " ")
    assert all(one.mask_token_id not in tokens for tokens in one.encode(contents))


@pytest.mark.shows("W43")
def test_long_samples_are_cut_and_nothing_is_lost(texts):
    pairs = read_texts(texts)
    tokenizer = TinyTokenizer([text for _id, text in pairs])
    samples = to_samples(pairs, tokenizer, 16)
    assert max(len(sample.tokens) for sample in samples) == 16
    whole = to_samples(pairs, tokenizer, 10_000)
    assert [t for s in samples for t in s.tokens] == [t for s in whole for t in s.tokens]
    assert len({sample.id for sample in samples}) == len(samples) > len(whole) == len(pairs)


def test_the_identity_of_the_data_depends_on_order_and_content():
    assert (
        len(
            {
                texts_sha256(pairs)
                for pairs in ([("a", "b")], [("a", "c")], [("a", "b"), ("c", "d")], [("c", "d"), ("a", "b")])
            }
        )
        == 4
    )
