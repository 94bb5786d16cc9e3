"""Discovery of external servers: addresses from the file, and DNS names that it resolves.

urls   as they are
dns    every address of HOST, looked up again every two seconds; a look that fails changes nothing
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

from cairn.fleet.config import FleetConfig

LOOK_S = 2.0


async def resolve(name: str) -> list[str]:
    """The servers behind HOST:PORT."""
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(
        host, int(port), type=socket.SOCK_STREAM, family=socket.AF_INET
    )
    return sorted({f"http://{address[0]}:{port}" for *_, address in addresses})


class Discovery:
    """Calls `use` with all servers whenever they change."""

    def __init__(
        self, config: FleetConfig, own: Sequence[str], use: Callable[[list[str]], None]
    ) -> None:
        self.config, self._own, self._use = config, list(own), use
        self.scaled: dict[str, list[str]] = {}  # by model: servers that come and go with the load
        self._found: dict[str, list[str]] = {}
        self._last: list[str] = []

    def use_own(self, urls: list[str]) -> None:
        """The fleet has exchanged its own servers for these."""
        self._own = urls
        self._changed()

    def urls(self) -> list[str]:
        fixed = [url for group in self.config.servers for url in group.urls]
        named = [group.dns for group in self.config.servers if group.dns]
        return [
            *self._own,
            *(url for urls in self.scaled.values() for url in urls),
            *fixed,
            *(url for name in named for url in self._found.get(name, ())),
        ]

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        for name in [group.dns for group in self.config.servers if group.dns]:
            try:
                self._found[name] = await resolve(name)
            except OSError:  # the name server does not answer: what was known stays
                continue
        self._changed()

    def _changed(self) -> None:
        if (urls := self.urls()) != self._last:
            self._last = urls
            self._use(urls)
