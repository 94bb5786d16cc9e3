import ctypes
import os
import platform
import struct

from cairn.labs.exercises.grading import Attempt, Figure, NotHere, case, equal, require

PORT = 53
DROP, PASS = 1, 2
BEGIN = 4096  # address of the packet in the simulated machine
BPF_CALL = {"x86_64": 321, "aarch64": 280}  # number of the system call
PROG_LOAD, PROG_TEST_RUN, XDP = 5, 10, 6
SIZES = {0x71: 1, 0x69: 2, 0x61: 4}
FEWEST = 17  # instructions of a straight solution


def packet(kind: int = 0x0800, first: int = 0x45, protocol: int = 17, port: int = PORT) -> bytes:
    """Ethernet, IPv4 with `first` as version and length, eight bytes of UDP or of TCP's beginning, and content."""
    network = struct.pack("!BBHHHBBH4s4s", first, 0, 46, 0, 0, 64, protocol, 0, bytes(4), bytes(4))
    return (
        bytes(12)
        + struct.pack("!H", kind)
        + network
        + struct.pack("!HHHH", 7, port, 26, 0)
        + bytes(18)
    )


def source_port() -> bytes:
    whole = packet(port=7)
    return whole[:34] + struct.pack("!H", PORT) + whole[36:]


PACKETS = (
    (packet(), DROP, "UDP to the port", "发往该端口的 UDP"),
    (packet(port=80), PASS, "UDP to another port", "发往其他端口的 UDP"),
    (source_port(), PASS, "UDP that comes from the port", "来自该端口的 UDP"),
    (packet(port=PORT << 8), PASS, "a port with the bytes the other way round", "字节颠倒的端口"),
    (packet(protocol=6), PASS, "TCP to the port", "发往该端口的 TCP"),
    (packet(kind=0x86DD), PASS, "IPv6", "IPv6"),
    (packet(first=0x46), PASS, "IPv4 with options", "带选项的 IPv4"),
)


def instructions(attempt: Attempt) -> list:
    """The learner's program with every label as a distance; each as (opcode, target, source, offset, value)."""
    parts, places, program = attempt.program(PORT), {}, []
    for part in parts:
        if isinstance(part, str):
            places[part] = len(program)
        else:
            program.append(part)
    for number, one in enumerate(program):
        if one.label:
            require(one.label in places, f"no label {one.label!r}", f"没有标签 {one.label!r}")
            program[number] = one._replace(offset=places[one.label] - number - 1)
    return [tuple(one[:5]) for one in program]


class Registers(dict):
    def __missing__(self, number: int) -> int:
        said = f"R{number} is read before it is set", f"R{number} 未赋值就被读取"
        require(False, *said)
        return 0


def simulated(code: list, data: bytes) -> int:
    """What the program returns for a packet; a read past its end is an error, as it is to the verifier."""
    end = BEGIN + len(data)
    registers = Registers({1: 0})  # the context is at 0
    at = steps = 0
    while steps < 1000:
        require(0 <= at < len(code), "it runs past its last instruction", "运行越过了最后一条指令")
        opcode, target, source, offset, value = code[at]
        at, steps = at + 1, steps + 1
        if opcode == 0x95:
            require(0 in registers, "R0 is not set when it leaves", "退出时 R0 未设置")
            return registers[0]
        if opcode in SIZES:
            registers[target] = _loaded(data, end, registers[source], offset, SIZES[opcode])
        elif opcode in (0xBF, 0xB7):
            registers[target] = registers[source] if opcode == 0xBF else value
        elif opcode == 0x07:
            registers[target] += value
        elif opcode in (0x2D, 0x55):
            above = opcode == 0x2D and registers[target] > registers[source]
            at += offset if above or (opcode == 0x55 and registers[target] != value) else 0
        else:
            require(False, f"opcode {opcode:#x} is not known here", f"未知的操作码 {opcode:#x}")
    require(False, "it does not end", "程序不会结束")
    return 0


def _loaded(data: bytes, end: int, base: int, offset: int, size: int) -> int:
    if base == 0:
        require(
            size == 4 and offset in (0, 4),
            f"the context has 4 bytes at 0 and at 4, not {size} at {offset}",
            f"上下文在 0 和 4 处各有 4 字节，而不是在 {offset} 处的 {size} 字节",
        )
        return end if offset else BEGIN
    first = base + offset - BEGIN
    require(
        first >= 0 and first + size <= len(data),
        f"reads bytes {first} to {first + size - 1} of a packet of {len(data)}",
        f"读取了 {len(data)} 字节数据包的第 {first} 至 {first + size - 1} 字节",
    )
    return int.from_bytes(data[first : first + size], "little")


@case("a number of the network, as it is loaded", "网络字节序的数加载后是什么")
def byte_order(attempt: Attempt) -> None:
    equal([attempt.as_loaded(field) for field in (0x0800, 53, 0x3535)], [0x0008, 0x3500, 0x3535])


@case("only UDP to the port is dropped (simulated machine)", "只丢弃发往该端口的 UDP（模拟机器）")
def filtered(attempt: Attempt) -> None:
    code = instructions(attempt)
    for data, expected, en, zh in PACKETS:
        verdict = simulated(code, data)
        require(
            verdict == expected,
            f"{en}: got {verdict}, wanted {expected}",
            f"{zh}：得到 {verdict}，应为 {expected}",
        )


@case("nothing is read past a packet's end (simulated machine)", "不越过包尾读取（模拟机器）")
def short(attempt: Attempt) -> None:
    code = instructions(attempt)
    for length in range(14, 42):
        equal(simulated(code, packet()[:length]), PASS)


@case("instructions that every packet may cost", "每个数据包要执行的指令数")
def length(attempt: Attempt) -> Figure:
    return Figure(len(instructions(attempt)), FEWEST, "instructions", allowed=1.5)


def bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """The system call; OSError where the kernel refuses. Also what it wrote back."""
    library = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    number = BPF_CALL.get(platform.machine())
    if number is None:
        raise OSError(0, f"unknown on {platform.machine()}")
    result = library.syscall(number, command, room, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result, room.raw


def loaded(code: list) -> int:
    """The kernel's descriptor of the program; OSError with the verifier's last line where it is refused."""
    raw = b"".join(
        struct.pack("<BBhi", opcode, source << 4 | target, offset, value)
        for opcode, target, source, offset, value in code
    )
    text = ctypes.create_string_buffer(raw, len(raw))
    licence, log = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(1 << 16)
    addresses = [ctypes.addressof(one) for one in (text, licence, log)]
    attributes = struct.pack("<IIQQIIQ", XDP, len(code), *addresses[:2], 1, len(log), addresses[2])
    try:
        return bpf(PROG_LOAD, attributes)[0]
    except OSError as error:
        lines = log.value.decode(errors="replace").strip().splitlines()
        complaints = [line for line in lines if not line.startswith(("processed", "verification"))]
        raise OSError(error.errno, complaints[-1] if complaints else error.strerror) from None


def run_in_kernel(program: int, data: bytes) -> int:
    room, out = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(4096)
    addresses = [ctypes.addressof(one) for one in (room, out)]
    given = struct.pack("<IIIIQQII", program, 0, len(data), len(out), *addresses, 1, 0)
    return struct.unpack_from("<I", bpf(PROG_TEST_RUN, given)[1], 4)[0]


@case("this kernel's verifier takes it, and it runs there", "本机内核的 verifier 接受并执行")
def in_kernel(attempt: Attempt) -> None:
    try:
        os.close(loaded([(0xB7, 0, 0, 0, PASS), (0x95, 0, 0, 0, 0)]))
    except OSError as error:
        raise NotHere(
            f"not looked at: this kernel refuses bpf() ({error.strerror}); it needs root or CAP_BPF",
            f"未检查：本机内核拒绝 bpf()（{error.strerror}）；需要 root 或 CAP_BPF",
        ) from None
    program = loaded(instructions(attempt))
    try:
        equal([run_in_kernel(program, data) for data, *_ in PACKETS], [one[1] for one in PACKETS])
    finally:
        os.close(program)
