"""One embedded Ray for all tests of a pytest process: starting one takes seconds. xdist's workers each have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clickline.distributed.session import RaySession, open_session
from clickline.progress import Progress


@pytest.fixture(scope="session")
def ray_session() -> Iterator[RaySession]:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    with open_session(None, cpus=4, home=None, progress=Progress()) as opened:
        yield opened
