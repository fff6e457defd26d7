"""Beam inspects a step of each kind once: a build of a few images in this process takes half the
time.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from apache_beam.transforms import userstate


@pytest.fixture(scope="session", autouse=True)
def quick_beam() -> Iterator[None]:
    inspect, found = userstate.get_dofn_specs, dict[type, Any]()

    def specs(step: object) -> Any:
        if type(step) not in found:
            found[type(step)] = inspect(step)
        return found[type(step)]

    with patch.object(userstate, "get_dofn_specs", specs):
        yield
