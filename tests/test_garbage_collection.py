"""A block without Python's garbage collection leaves the collector as it was."""

from __future__ import annotations

import gc
import weakref

import pytest

from saccade.support._garbage_collection import uncollected


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def young(wanted):
    return any(each is wanted for generation in (0, 1) for each in gc.get_objects(generation))


@pytest.fixture
def unfrozen():
    """The tests run with their own imports frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow
def test_objects_of_the_block_are_old_afterwards_and_not_kept_for_ever(unfrozen):
    with uncollected():
        assert not gc.isenabled()
        stays, garbage = Node(), cycle()
        assert young(stays)
    assert gc.isenabled()
    assert not young(stays)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert garbage() is None


def test_blocks_may_be_nested_and_fail():
    with pytest.raises(ValueError), uncollected(), uncollected():
        raise ValueError
    assert gc.isenabled()


def test_a_collector_that_is_switched_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_caller_has_frozen_stays_frozen():
    gc.freeze()
    count = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() == count > 0
