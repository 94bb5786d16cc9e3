"""Pictures from URLs: out of data URLs, and over HTTP from hosts that the operator has named.

No host is named by default. A name is resolved once, every address has to be public, and that address is dialled, so a
name cannot change its mind in between; each redirect is judged as if it had been sent. Sizes and time are bounded.
Never a file, never a proxy.
"""

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from cairn.core.errors import RequestError
from cairn.models.vision.picture import MOST_BYTES, MOST_FRAMES

PORTS = {"http": 80, "https": 443}
MOST_REDIRECTS = 3
MOST_SECONDS = 5.0
MOST_URL = 8192  # characters of one that is fetched
CHUNK = 1 << 16
REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Sequence[str]]
Dial = Callable[[str, int, float], socket.socket]


def resolve_host(host: str, port: int) -> list[str]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def dial_address(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout_s)


class MediaLoader:
    """Bytes of a URL. May be used from any thread."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        resolve: Resolve = resolve_host,
        dial: Dial = dial_address,
    ) -> None:
        """`hosts`: names, *.name for all below one, * for any public host."""
        self.hosts = [host.lower() for host in hosts]
        self._resolve, self._dial = resolve, dial

    def load_frames(self, url: str, where: str) -> list[bytes]:
        """Load a video: a file, or each frame of a data URL `data:video/jpeg;base64,FRAME,FRAME`."""
        head, comma, data = url.partition(",")
        if head[:11].lower() != "data:video/" or not comma:
            return [self.load(url, where)]
        frames = data.split(",", MOST_FRAMES)
        if len(data) > MOST_BYTES * 4 // 3 + 4 * len(frames) or len(frames) > MOST_FRAMES:
            raise RequestError(
                f"{where}: the video has more than {MOST_BYTES} bytes or {MOST_FRAMES} frames",
                hint="send a shorter one",
            )
        return [read_data_url(f"{head},{frame}", where) for frame in frames]

    def load(self, url: str, where: str) -> bytes:
        """RequestError says why there is nothing."""
        if url[:5].lower() == "data:":
            return read_data_url(url, where)
        deadline = time.monotonic() + MOST_SECONDS
        for _ in range(MOST_REDIRECTS + 1):
            parts, address = self._judged(url, where)
            try:
                status, headers, body = self._get(parts, address, deadline)
            except (OSError, http.client.HTTPException, ValueError) as problem:
                reason = f"{type(problem).__name__}: {problem}"[:120]
                raise RequestError(f"{where}: the image could not be fetched: {reason}") from None
            if status == 200:
                return body
            moved = headers.get("location")
            if status not in REDIRECTS or not moved:
                raise RequestError(f"{where}: the image's server answered with status {status}")
            try:
                url = urljoin(url, moved)
            except ValueError:
                raise RequestError(f"{where}: the image's server leads to no URL") from None
        raise RequestError(f"{where}: more than {MOST_REDIRECTS} redirects")

    def _judged(self, url: str, where: str) -> tuple[SplitResult, str]:
        """A URL that may be fetched, and the one address to dial."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise RequestError(f"{where}: {url[:60]!r} is no URL") from None
        if parts.scheme not in PORTS or len(url) > MOST_URL:
            raise RequestError(
                f"{where}: {url[:60]!r} is not loaded",
                hint="send a data URL: data:image/png;base64,...",
            )
        if not self._is_named(host):
            raise RequestError(
                f"{where}: images of {host[:100]!r} are not fetched",
                hint="send a data URL; the operator can allow hosts with --media-hosts",
            )
        if port not in (None, PORTS[parts.scheme]) or parts.username or parts.password:
            raise RequestError(f"{where}: a port or a password in the URL of an image")
        try:
            addresses = self._resolve(host, PORTS[parts.scheme])
        except (OSError, ValueError):  # ValueError: a name that cannot be one, such as a..b
            addresses = []
        if not addresses or not all(map(is_public, addresses)):
            raise RequestError(f"{where}: {host[:100]!r} has no public address")
        return parts, addresses[0]

    def _is_named(self, host: str) -> bool:
        return any(
            one == "*" or host == one or (one.startswith("*.") and host.endswith(one[1:]))
            for one in self.hosts
        )

    def _get(
        self, parts: SplitResult, address: str, deadline: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        host = parts.hostname or ""
        plain = self._dial(address, PORTS[parts.scheme], _left(deadline))
        with plain:
            wrapped = plain
            if parts.scheme == "https":
                wrapped = ssl.create_default_context().wrap_socket(
                    plain, server_hostname=host, do_handshake_on_connect=False
                )
            connection = http.client.HTTPConnection(host)
            connection.sock = wrapped
            # A socket's timeout is of one call: a server that sends a byte now and then would have for ever.
            timer = threading.Timer(_left(deadline), _cut, (wrapped,))
            timer.daemon = True
            timer.start()
            try:
                if isinstance(wrapped, ssl.SSLSocket):
                    wrapped.do_handshake()
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers={"Host": host, "Accept": "image/*"})
                wrapped.settimeout(_left(deadline))
                answer = connection.getresponse()
                body = _read(answer, wrapped, deadline) if answer.status == 200 else b""
                return answer.status, answer.headers, body
            finally:
                timer.cancel()
                connection.close()


def _cut(wrapped: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(wrapped, socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Not a private, loopback, link-local, shared or reserved network, also behind an IPv4 address in IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        inner = inner or (ip.teredo[1] if ip.teredo else None)
        if inner is not None and not inner.is_global:
            return False
        if ip in NAT64:
            return ipaddress.ip_address(int(ip) & 0xFFFFFFFF).is_global
        if ip not in UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


NAT64 = ipaddress.ip_network("64:ff9b::/96")
UNICAST = ipaddress.ip_network("2000::/3")  # all that has been given out for the internet


def read_data_url(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(
            f"{where}: the data URL has no base64", hint="data:image/png;base64,iVBOR..."
        )
    if len(data) > MOST_BYTES * 4 // 3 + 4:
        raise RequestError(
            f"{where}: the image has more than {MOST_BYTES} bytes", hint="send a smaller one"
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: the data URL is not base64") from None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it took longer than {MOST_SECONDS:g} s")
    return left


def _read(answer: http.client.HTTPResponse, wrapped: socket.socket, deadline: float) -> bytes:
    parts, size = [], 0
    while not answer.isclosed():  # Python may close it with the last byte
        wrapped.settimeout(_left(deadline))
        part = answer.read1(CHUNK)
        if not part:
            _left(deadline)  # where the timer has cut it, it is not whole
            break
        size += len(part)
        if size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
