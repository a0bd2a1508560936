"""The switch and the counts.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.acceleration._rules import SMALL
from saccade.interception._hooks import sdpa_handled_by
from saccade.operator import _observers

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture
def x():
    return torch.randn(2, 3, 5, 8)


def call(x):
    return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.usefixtures("every_size")
def test_install_and_uninstall(x):
    run = saccade.accelerate()
    assert run.install() is run
    call(x)
    run.uninstall()
    call(x)
    assert (run.calls, run.taken, run.backends) == (1, 1, {"native": 1})
    assert F.scaled_dot_product_attention is ORIGINAL
    with run:  # and on again: it goes on counting
        call(x)
    assert run.taken == 2


def test_twice_on_or_off_is_refused():
    run = saccade.accelerate()
    with pytest.raises(RuntimeError, match="not switched on"):
        run.uninstall()
    with run:
        with pytest.raises(RuntimeError, match=r"switched on already; saccade.accelerate\(\) makes another"):
            run.install()
        assert F.scaled_dot_product_attention is not ORIGINAL
    with pytest.raises(RuntimeError, match="not switched on"):
        run.uninstall()


@pytest.mark.usefixtures("every_size")
def test_nested_blocks_each_count_their_own_time(x):
    with saccade.accelerate() as outer:
        call(x)
        with saccade.accelerate() as inner:
            call(x), call(x.double())
        call(x)
    assert (inner.calls, inner.taken) == (2, 1)
    assert (outer.calls, outer.taken) == (4, 3)
    assert sum(outer.left.values()) == 1


@pytest.mark.usefixtures("every_size")
def test_blocks_that_end_in_another_order(x):
    def block(run):
        with run:
            yield

    first, second = saccade.accelerate(), saccade.accelerate()
    one, other = block(first), block(second)
    next(one), next(other)
    one.close()
    call(x)
    other.close()
    assert (first.calls, second.taken) == (0, 1)


@pytest.mark.usefixtures("every_size")
def test_exceptions_put_everything_back(x):
    with pytest.raises(ZeroDivisionError), saccade.accelerate() as run:
        call(x)
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is ORIGINAL
    with saccade.accelerate() as run:
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(x, x[..., :3], x)
        call(x)
    assert run.taken == 1


@pytest.mark.usefixtures("every_size")
def test_other_threads_are_untouched_and_not_counted(x):
    inside, outside = [], []
    ready, done = threading.Event(), threading.Event()

    def other():
        ready.wait(60)
        with sdpa_handled_by(lambda call, proceed: outside.append(proceed()) or outside[-1]):
            call(x)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with saccade.accelerate() as run:
        ready.set()
        assert done.wait(60)
        inside.append(call(x))
    thread.join()
    assert run.calls == run.taken == 1
    assert torch.equal(outside[0], ORIGINAL(x, x, x))
    torch.testing.assert_close(inside[0], outside[0])


@pytest.mark.usefixtures("every_size")
def test_install_is_for_the_thread_that_calls_it_and_uninstall_for_any(x):
    run, counts = saccade.accelerate(), []
    run.install()

    def other():
        call(x)
        counts.append(run.calls)
        run.uninstall()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert counts == [0]
    call(x)
    assert run.calls == 0
    assert F.scaled_dot_product_attention is ORIGINAL


def test_the_counts_print_themselves(x):
    run = saccade.accelerate()
    assert str(run) == (
        "saccade.accelerate(): no call of F.scaled_dot_product_attention or flex_attention was seen (attention written "
        "as products and a softmax is not seen)"
    )
    small = saccade.accelerate(torch.nn.Linear(3, 5))
    with small:
        pass
    assert str(small).endswith(
        "modules of the model:\n    none: no linear layer is large enough, and no other part is known"
    )
    assert repr(run) == "<saccade.accelerate(), off: 0 of 0 calls of attention taken>"
    with run:
        big = torch.randn(1, 8, 128, 16)
        call(big), call(big[:, :7, :100]), call(big.double()), call(big.double())
        assert repr(run) == "<saccade.accelerate(), on: 1 of 4 calls of attention taken>"
    lines = str(run).splitlines()
    assert lines[0] == "saccade.accelerate(): 1 of 4 calls of attention taken (25%)"
    assert lines[1].startswith("       1  by native (")
    assert lines[2:] == [
        "       2  left to PyTorch: in float64, for which there are no native kernels",
        f"       1  left to PyTorch: {SMALL}",
    ]


@pytest.mark.usefixtures("every_size")
def test_observers_of_the_thread_are_told_once_of_what_is_taken(x):
    seen = []
    mask = torch.rand(2, 1, 1, 5) < 0.7
    with _observers.observed_by(seen.append), saccade.accelerate() as run:
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.3)
        call(x.double())  # PyTorch's: whoever wants to see it handles calls, too
    assert (run.taken, len(seen)) == (1, 1)
    (told,) = seen
    assert told.source == "F.scaled_dot_product_attention"
    assert told.query is told.key is told.value is x and told.out is out and told.scale == 0.3
    assert torch.equal(told.mask.dense(5, 5).expand(2, 1, 5, 5), mask.expand(2, 1, 5, 5))


@pytest.mark.usefixtures("every_size")
def test_handlers_around_it_see_only_what_is_left(x):
    seen = []
    with sdpa_handled_by(lambda call, proceed: seen.append(call) or proceed()), saccade.accelerate():
        call(x), call(x.double())
    assert [call.query.dtype for call in seen] == [torch.float64]


@pytest.mark.usefixtures("every_size")
def test_a_backend_that_is_named_computes(x):
    seen = []
    expected = saccade.attention(x, x, x, backend="sdpa")
    with saccade.accelerate() as run, sdpa_handled_by(lambda call, proceed: seen.append(call) or proceed()):
        assert torch.equal(saccade.attention(x, x, x, backend="sdpa"), expected)
    assert run.calls == 0 and not seen
