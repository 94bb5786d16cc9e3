"""The process that decodes pictures: files of strangers in, prepared pictures out, one after another.

    stdin: length, msgpack of Job     stdout: length, msgpack of Decoded

It has little memory and no files to write, so a decoder that misbehaves takes nothing but itself along. Imports no
torch: it starts in a moment.
"""

import resource
import sys
import time
from typing import IO

import msgspec

from cairn.core.errors import CairnError
from cairn.models.vision.picture import Picture, prepare, prepare_video
from cairn.models.vision.tiling_rules import ImageRules

MOST_MEMORY = 2 << 30  # bytes of address space
MOST_CPU_S = 30  # of one picture
LENGTH = 4  # bytes


class Job(msgspec.Struct, frozen=True):
    contents: list[bytes]  # of one file, or of one for each frame
    rules: ImageRules
    fps: float = 0.0  # frames a second, of a video; 0: it is a picture


class Decoded(msgspec.Struct, frozen=True):
    picture: Picture | None = None
    message: str = ""  # why there is none
    hint: str | None = None


encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_done = msgspec.msgpack.Decoder(Decoded).decode


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    while (job := read_message(sys.stdin.buffer)) is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MOST_CPU_S, hard))
        write_message(sys.stdout.buffer, encode(_done(decode_job(job))))


def _done(job: Job) -> Decoded:
    try:
        if job.fps:
            return Decoded(prepare_video(job.contents, job.rules, job.fps))
        return Decoded(prepare(job.contents[0], job.rules))
    except CairnError as problem:
        return Decoded(None, problem.message, problem.hint)
    except MemoryError:
        return Decoded(None, "the image needs more memory than a picture may have")


def read_message(stream: IO[bytes]) -> bytes | None:
    """Read a message; None if the other side has closed the stream."""
    head = stream.read(LENGTH)
    if len(head) < LENGTH:
        return None
    count = int.from_bytes(head, "little")
    body = stream.read(count)
    return body if len(body) == count else None


def write_message(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(LENGTH, "little") + body)
    stream.flush()


if __name__ == "__main__":
    main()
