"""A small Ray for the tests of a file: four CPUs, whatever the machine has."""

from collections.abc import Iterator

import pytest

from recd_plugin_dsi.cluster import join
from recd_plugin_dsi.options import RayOptions


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    cluster = join(RayOptions(cpus=4, memory="30MB", start_timeout=280), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", cluster.token or "")
        yield cluster.address
    cluster.leave()
