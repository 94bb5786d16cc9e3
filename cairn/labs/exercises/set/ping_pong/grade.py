import contextlib
import socket
import threading

from cairn.labs.exercises.grading import Attempt, case, close, equal, require


class Dripping:
    """A link whose recv returns a few bytes at a time."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def recv(self, count: int) -> bytes:
        part, self.content = self.content[: min(count, 3)], self.content[min(count, 3) :]
        return part


class Kept:
    def __init__(self) -> None:
        self.content = b""

    def sendall(self, content: bytes) -> None:
        self.content += content


@case("messages keep their borders over a real socket", "真实 socket 上消息边界不乱")
def borders(attempt: Attempt) -> None:
    one, other = socket.socketpair()
    messages, wrong = [b"", b"a", bytes(70_000), b"last"], []

    def send() -> None:
        try:
            for content in messages:
                attempt.send_message(one, content)
        except Exception as error:  # noqa: BLE001  raised again by the case
            wrong.append(error)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)

    with one, other:
        other.settimeout(2)
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        lengths = [len(attempt.receive_message(other)) for _ in messages]
        thread.join(5)
    if wrong:
        raise wrong[0]
    equal(lengths, [len(content) for content in messages])


@case("a message that comes in drips is whole", "分段到达的消息是完整的")
def drips(attempt: Attempt) -> None:
    recorder = Kept()
    attempt.send_message(recorder, b"hello over a slow link")
    equal(attempt.receive_message(Dripping(recorder.content)), b"hello over a slow link")


@case("half a message is an error", "半条消息是错误")
def half(attempt: Attempt) -> None:
    recorder = Kept()
    attempt.send_message(recorder, b"hello over a slow link")
    try:
        attempt.receive_message(Dripping(recorder.content[:-5]))
    except ConnectionError:
        return
    require(False, "it must raise ConnectionError", "应抛出 ConnectionError")


@case(
    "alpha and beta are found, with noise on the large messages",
    "大消息有噪声时仍能拟合 alpha 与 beta",
)
def fitted(attempt: Attempt) -> None:
    noise = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.03]
    times = [(2.0**n, (20e-6 + 2.0**n / 5e9) * noise[n // 4]) for n in range(0, 28, 4)]
    alpha, beta = attempt.fit(times)
    require(abs(alpha / 20e-6 - 1) < 0.05, f"alpha {alpha:.3g}", f"alpha 为 {alpha:.3g}")
    require(abs(beta / 5e9 - 1) < 0.1, f"beta {beta:.3g}", f"beta 为 {beta:.3g}")
    close(attempt.half_size(20e-6, 5e9), 100_000)
