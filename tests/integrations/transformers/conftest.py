from __future__ import annotations

import pytest

from integrations.transformers.judge import judging
from saccade.integrations.transformers import register, unregister


@pytest.fixture
def registered():
    register()
    yield
    unregister()


@pytest.fixture
def judged():
    with judging():
        yield
