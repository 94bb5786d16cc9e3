"""A damaged GGUF file is one clear error: never a traceback, a hang or a large allocation."""

import contextlib
import struct
import time
import tracemalloc

import gguf
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType as Type
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.file import GGUFFile

U32, STRING, ARRAY = 4, 8, 9
ABSURD = 2**60


def u32(number):
    return struct.pack("<I", number)


def u64(number):
    return struct.pack("<Q", number)


def text(content, length=None):
    content = content.encode() if isinstance(content, str) else content
    return u64(len(content) if length is None else length) + content


def key(name, kind, value):
    return text(name) + u32(kind) + value


def tensor(name, dimensions, kind=Type.F32, offset=0):
    shape = b"".join(u64(size) for size in dimensions)
    return text(name) + u32(len(dimensions)) + shape + u32(kind) + u64(offset)


V3 = u32(3)
LLAMA = key("general.architecture", STRING, text("llama"))


def container(keys=(LLAMA,), tensors=(), data=b"", magic=b"GGUF", version=V3, counts=None, pad=32):
    """A GGUF file by hand, right or wrong."""
    counts = counts or u64(len(tensors)) + u64(len(keys))
    head = magic + version + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % pad) + data


TWO = (tensor("a", [8]), tensor("b", [8], offset=32))
WRONG = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF", "8 bytes expected at byte 0, 4 left"),
    "magic": (container(magic=b"PK\x03\x04"), r"begins with b'PK\\x03\\x04', not b'GGUF'"),
    "version 1": (container(version=u32(1)), "is GGUF version 1; versions 2 and 3 are read"),
    "big-endian": (container(version=u32(3)[::-1]), "is a big-endian GGUF file"),
    "no counts": (b"GGUF" + u32(3), "8 bytes expected at byte 8, 0 left"),
    "many tensors": (container(counts=u64(ABSURD) + u64(1)), f"ends inside {ABSURD} tensors"),
    "many keys": (container(counts=u64(0) + u64(ABSURD)), f"ends inside {ABSURD} metadata keys"),
    "long key": (container(keys=[text("general", ABSURD)]), f"key: {ABSURD} bytes expected"),
    "longish key": (container(keys=[text("k" * 5000)]), "5000 bytes of text in a metadata key"),
    "long value": (container(keys=[key("k", STRING, u64(ABSURD))]), f"'k': {ABSURD} bytes"),
    "long array": (
        container(keys=[key("k", ARRAY, u32(U32) + u64(ABSURD))]),
        f"ends inside {ABSURD} numbers in 'k'",
    ),
    "long list": (
        container(keys=[key("k", ARRAY, u32(STRING) + u64(ABSURD))]),
        f"ends inside {ABSURD} strings in 'k'",
    ),
    "bad string": (
        container(keys=[key("k", ARRAY, u32(STRING) + u64(2) + text("x") + u64(ABSURD))]),
        f"the value of 'k': {ABSURD} bytes expected",
    ),
    "array of arrays": (
        container(keys=[key("k", ARRAY, u32(ARRAY) + u64(1) + bytes(64))]),
        "an array of the unknown value type 9",
    ),
    "value type": (container(keys=[key("k", 77, b"")]), "unknown value type 77 at 'k'"),
    "not UTF-8": (container(keys=[key("k", STRING, text(b"\xff\xfe"))]), r"not UTF-8 in .* 'k'"),
    "not UTF-8 key": (container(keys=[text(b"\xff") + bytes(12)]), "not UTF-8 in a metadata key"),
    "key twice": (container(keys=[LLAMA, LLAMA]), "metadata key 'general.architecture' twice"),
    "tensor twice": (
        container(tensors=[tensor("a", [8]), tensor("a", [8], offset=32)], data=bytes(64)),
        "the tensor 'a' twice",
    ),
    "alignment": (
        container(keys=[LLAMA, key("general.alignment", U32, u32(12))]),
        "general.alignment 12, not a power of two",
    ),
    "dimensions": (container(tensors=[tensor("a", [2] * 5)]), "'a' with 5 dimensions"),
    "no elements": (container(tensors=[tensor("a", [0])]), r"'a' of shape \(0,\)"),
    "part of a block": (
        container(tensors=[tensor("a", [40], Type.Q8_0)], data=bytes(64)),
        r"'a' of shape \(40,\), which Q8_0 cannot store in blocks of 32",
    ),
    "type": (container(tensors=[tensor("a", [8], 4)]), "'a' in the unknown quantisation type 4"),
    "integers": (
        container(tensors=[tensor("a", [8], Type.I32)], data=bytes(32)),
        "'a' in I32, which cannot be read",
    ),
    "intermediate type": (
        container(tensors=[tensor("a", [256], Type.Q8_K)], data=bytes(292)),
        "'a' in Q8_K, which cannot be read",
    ),
    "cut short": (
        container(tensors=TWO, data=bytes(63)),
        r"ends inside tensor 'b': it needs bytes \d+ to \d+, the file has \d+",
    ),
    "absurd offset": (container(tensors=[tensor("a", [8], offset=ABSURD)]), "inside tensor 'a'"),
    "absurd shape": (container(tensors=[tensor("a", [2**63] * 4)]), "inside tensor 'a'"),
    "overlap": (
        container(tensors=[tensor("a", [16]), tensor("b", [8], offset=32)], data=bytes(64)),
        "'b' at offset 32, across another",
    ),
    "between": (
        container(tensors=[tensor("a", [8], offset=4)], data=bytes(64)),
        "'a' at offset 4, across another one or between multiples of 32",
    ),
    "vocabulary only": (container(), "no matrix token_embd.weight among 0 tensors"),
}


@contextlib.contextmanager
def at_most_bytes(limit):
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit


@pytest.mark.parametrize("name", WRONG)
def test_one_line_names_the_file_the_fault_and_a_way_out(tmp_path, name):
    content, message = WRONG[name]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error, at_most_bytes(8 << 20):
        GGUFFile(path)
    assert str(path) in error.value.message
    assert "\n" not in str(error.value)
    assert len(error.value.message) < 400
    assert error.value.hint


def test_what_is_no_file(tmp_path):
    with pytest.raises(WeightsError, match=r"absent\.gguf cannot be opened: No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(WeightsError, match="cannot be opened: Is a directory"):
        GGUFFile(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of files that open, and where their tensor data begins."""
    folder = tmp_path_factory.mktemp("sound")
    files = []
    for name, kind in (("llama3", Type.Q8_0), ("mixtral", Type.F32), ("gemma3", Type.Q4_0)):
        model, tensors = tiny_gguf.checkpoint(name)
        path = tiny_gguf.convert(model.config, tensors, folder / name, matrices=kind)
        GGUFFile(path)
        files.append((path.read_bytes(), int(gguf.GGUFReader(path).data_offset)))
    return files


def read_all(path):
    """Opens and reads everything; a refusal is as good, anything else is a bug."""
    try:
        with GGUFFile(path) as file:
            file.config()
            for name in file.names():
                assert file.tensor(name).shape == file.shape(name)
                assert file.tensor(name).dtype == file.dtype(name)
    except (WeightsError, UnsupportedModel) as error:
        return str(error)
    return ""


def test_a_file_cut_anywhere_is_refused(sound, tmp_path):
    path = tmp_path / "cut.gguf"
    content, data_start = sound[0]
    everywhere = [*range(0, data_start, 3), *range(data_start, len(content), 4999)]
    for length in everywhere:
        path.write_bytes(content[:length])
        assert "hint: " in read_all(path), f"{length} of {len(content)} bytes opened"


@settings(max_examples=250)
@given(data=st.data())
def test_flipped_bytes_in_the_header_never_crash(sound, tmp_path_factory, data):
    content, data_start = data.draw(st.sampled_from(sound))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, data_start - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(damaged)
    assert "\n" not in read_all(path)


@settings(max_examples=150)
@given(body=st.binary(max_size=300), counts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
@example(body=b"", counts=(0, 0))
def test_noise_behind_the_magic_never_crashes(tmp_path_factory, body, counts):
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + u32(3) + u64(counts[0]) + u64(counts[1]) + body)
    assert read_all(path)


def test_a_large_vocabulary_opens_quickly(tmp_path):
    count = 150_000
    words = [f"token {number}" for number in range(count)]
    strings = u32(STRING) + u64(count) + b"".join(text(word) for word in words)
    numbers = u32(U32) + u64(count) + struct.pack(f"<{count}I", *range(count))
    keys = [
        key("tokens", ARRAY, strings),
        key("merges", ARRAY, strings),
        key("ids", ARRAY, numbers),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(container(keys=keys, tensors=[tensor("a", [8], 99)]))
    began = time.thread_time()
    with pytest.raises(WeightsError, match="unknown quantisation type 99"):  # behind the metadata
        GGUFFile(path)
    assert time.thread_time() - began < 3.0  # of CPU; a fifth of a second where the machine is idle
