import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """`ranks(size)`: the group of that many processes, which stays."""
    groups = {}

    def of(size):
        if size not in groups:
            groups[size] = Ranks(size, tmp_path_factory.mktemp("ranks"))
        return groups[size]

    yield of
    for group in groups.values():
        group.close()
