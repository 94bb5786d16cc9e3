"""One tiny model for all tests of the server, and one server for those that need nothing special."""

import live_server
import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return live_server.make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tiny_folder):
    with live_server.live(tiny_folder) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").at_rest()
