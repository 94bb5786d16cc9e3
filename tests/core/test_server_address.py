"""What is no address is refused before a connection is tried, and by one error."""

import pytest

from cairn.core.errors import UsageError
from cairn.core.server_address import place


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://x",
        "http://",
        "http://x:notaport",
        "",
        "http://[::1",
        "http://a..b",
        "http://exa mple",
        "http://x\ny",
        f"http://{'a' * 70}.org",
    ],
)
def test_an_address_that_is_none(url):
    with pytest.raises(UsageError, match="no address"):
        place(url)


def test_addresses():
    assert place("http://[::1]:80/") == ("::1", 80, False, "")
    assert place("https://host/llm/v1/") == ("host", 443, True, "/llm")
