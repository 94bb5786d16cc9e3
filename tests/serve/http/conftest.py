"""One tiny model for all tests of the server, and one server for those that need nothing special."""

import live_server
import pytest

from cairn.serve.token_marks import ROUTER_SECRET


@pytest.fixture(scope="session", autouse=True)
def router_secret():
    """Servers and routers of these tests belong to one fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUTER_SECRET, "known to the routers of the tests")
        yield


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


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory):
    """A model whose template teaches tool calls and can open a thought, and that knows texts with a gap."""
    folder = tmp_path_factory.mktemp("models") / "agent"
    return live_server.make_folder(
        folder, live_server.AGENT, 768, ["</think>", *live_server.GAP_MARKS]
    )


@pytest.fixture(scope="module")
def agent(agent_folder):
    with live_server.live(agent_folder, num_gpu_blocks_override=512) as made:
        yield made
        made.at_rest()
