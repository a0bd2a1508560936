"""Reading texts, splitting them, and cutting windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from looped import looped
from saccade.models.tokenizers.own import train_characters
from saccade.training import Corpus, draw_windows, read_texts, split_tail, whole_windows
from saccade.training.language.windows import draw_copying


def test_a_file_and_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("b — é")
    (tmp_path / "deep" / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nz")
    (tmp_path / "c.md").write_text("not read")
    assert read_texts(tmp_path / "b.txt") == {tmp_path / "b.txt": "b — é"}
    assert list(read_texts(tmp_path).values()) == ["b — é", "a\nz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xd8", r"x.txt: not UTF-8 text \(byte 0\)"),
        (b"good \xff", r"x.txt: not UTF-8 text \(byte 5\)"),
        (b"a\0b", "x.txt: binary, not text"),
        (b"", "x.txt: empty"),
        (b" \n\t\n", "x.txt: empty"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    (tmp_path / "x.txt").write_bytes(content)
    for path in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(ValueError, match=message):
            read_texts(path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file or folder"):
        read_texts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no .txt file in this folder"):
        read_texts(tmp_path)


def test_the_last_tenth():
    assert split_tail("0123456789" * 2) == ("012345678901234567", "89")


def test_corpus_has_a_start_token_before_each_text():
    tokenizer = train_characters(["ab\ncd"])
    corpus = Corpus.encode(["ab\nc", "d"], ["dd"], tokenizer)
    ids = {c: tokenizer.encode(c).ids[0] for c in "ab\ncd"}
    assert corpus.training.tolist() == [tokenizer.start, *(ids[c] for c in "ab\nc"), tokenizer.start, ids["d"]]
    assert corpus.validation.tolist() == [tokenizer.start, ids["d"], ids["d"]]


TOKENS = torch.arange(1000, 1101)


def draw(step=0, *, tokens=TOKENS, seed=7, batch=5, context=23, repeats=0.0):
    return draw_windows(tokens, start=1, context=context, batch=batch, seed=seed, step=step, repeats=repeats)


def test_windows_are_stretches_of_the_text_behind_a_start_token():
    windows = draw()
    assert windows.shape == (5, 24)
    assert (windows[:, 0] == 1).all()
    assert (windows[:, 2:] - windows[:, 1:-1] == 1).all()


def test_windows_are_a_function_of_seed_and_step():
    torch.manual_seed(1)
    np.random.seed(1)
    first = draw(3)
    torch.manual_seed(2)
    np.random.seed(2)
    draw(2)
    assert torch.equal(draw(3), first)
    assert not torch.equal(draw(4), first)
    assert not torch.equal(draw(3, seed=8), first)


def test_windows_reach_both_ends_of_the_text():
    starts = {int(row[1]) for step in range(400) for row in draw(step)}
    assert starts == set(range(1000, 1101 - 23 + 1))


def test_drawing_leaves_the_text_alone():
    before = TOKENS.clone()
    draw(repeats=1.0)
    assert torch.equal(TOKENS, before)


@pytest.mark.parametrize("context", [2, 23, 64])
def test_repeated_stretches_follow_themselves(context):
    lengths = set()
    for step in range(60):
        for row in draw(step, repeats=1.0, context=context):
            repeated = [n for n in range(1, context // 2 + 1) if _says_twice(row[1:], n)]
            assert repeated
            lengths.add(max(repeated))
    assert lengths <= set(range(min(16, context // 2), context // 2 + 1))
    assert max(lengths) == context // 2


def _says_twice(tokens, length) -> bool:
    """Whether a stretch of this length is followed by itself; without repeats all tokens differ."""
    tokens = tokens.tolist()
    return any(
        tokens[s : s + length] == tokens[s + length : s + 2 * length] for s in range(len(tokens) - 2 * length + 1)
    )


def test_share_of_repeats():
    windows = torch.cat([draw(step, repeats=0.25) for step in range(200)])
    share = (windows[:, 2:] - windows[:, 1:-1] != 1).any(1).double().mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5


@looped("context", [2, 7, 23, 64, 101])
def test_copying_windows_say_the_same_over_and_over(context):
    periods = set()
    for step in range(100):
        windows = draw_copying(31, start=5, context=context, batch=3, seed=7, step=step)
        assert windows.shape == (3, min(context, 64) + 1)
        assert (windows[:, 0] == 5).all()
        assert ((windows[:, 1:] != 5) & (windows[:, 1:] >= 0) & (windows[:, 1:] < 31)).all()
        for body in windows[:, 1:]:
            periods.add(next(n for n in range(1, len(body) + 1) if torch.equal(body[n:], body[:-n])))
    longest = min(24, context // 2)
    assert periods == set(range(min(4, longest), longest + 1))
    again = draw_copying(31, start=5, context=context, batch=3, seed=7, step=99)
    assert torch.equal(again, windows)


def test_whole_windows_predict_each_token_once():
    windows = whole_windows(TOKENS, start=1, context=23)
    assert windows.shape == (4, 24)
    assert (windows[:, 0] == 1).all()
    assert windows[:, 1:].flatten().tolist() == list(range(1000, 1092))


@pytest.mark.parametrize("cut", [lambda t: draw(tokens=t), lambda t: whole_windows(t, start=1, context=23)])
def test_too_short_a_text(cut):
    assert cut(TOKENS[:23]).shape[1] == 24
    with pytest.raises(ValueError, match=r"text: 22 tokens are too short for one window of 23 \(the context\)"):
        cut(TOKENS[:22])
