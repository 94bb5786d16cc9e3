import random

from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


@case("blocks do not overlap and are aligned to 512", "块不重叠且按 512 对齐")
def disjoint(attempt: Attempt) -> None:
    dice, allocated = random.Random(1), {}
    allocator = attempt.Allocator(1 << 22)
    for _ in range(400):
        if allocated and dice.random() < 0.5:
            address = dice.choice(list(allocated))
            allocator.release(address)
            del allocated[address]
            continue
        size = dice.randrange(1, 6000)
        address = allocator.allocate(size)
        require(address % 512 == 0, f"address {address} is not aligned", f"地址 {address} 未对齐")
        for other, length in allocated.items():
            apart = address + size <= other or other + length <= address
            require(apart, "two blocks overlap", "两个块重叠")
        allocated[address] = size


@case("a released block is used again", "释放的块会被复用")
def reused(attempt: Attempt) -> None:
    allocator = attempt.Allocator(1 << 20)
    first = allocator.allocate(1000)
    allocator.release(first)
    equal(allocator.allocate(900), first)
    equal(allocator.segments, 1)


@case("best fit keeps the large block whole", "最佳适配不切大块")
def best_fit(attempt: Attempt) -> None:
    allocator = attempt.Allocator(8192 + 1024)
    large, small = allocator.allocate(8192), allocator.allocate(1024)
    allocator.release(large)
    allocator.release(small)
    equal(allocator.allocate(1024), small)
    equal(allocator.allocate(8192), large)


@case("neighbours merge inside a segment", "段内相邻空闲块合并")
def merged(attempt: Attempt) -> None:
    allocator = attempt.Allocator(4096)
    allocator.release(allocator.allocate(4096))
    parts = [allocator.allocate(1024) for _ in range(4)]
    for part in (parts[1], parts[3], parts[0], parts[2]):
        allocator.release(part)
    equal(allocator.allocate(4096), 0)


@case("segments stay apart", "不跨段合并")
def apart(attempt: Attempt) -> None:
    allocator = attempt.Allocator(2048)
    a, b = allocator.allocate(1024), allocator.allocate(1024)
    allocator.release(a)
    allocator.release(b)
    try:
        allocator.allocate(2048)
    except MemoryError:
        return
    require(False, "a block over two segments was handed out", "给出了跨两个段的块")


@case("memory reserved for a training-like pattern", "类训练负载下保留的显存")
def reserved(attempt: Attempt) -> Figure:
    allocator = attempt.Allocator(1 << 24)
    for _ in range(20):
        step = [allocator.allocate(size) for size in (70_000, 200, 3000, 70_000, 512)]
        for address in reversed(step):
            allocator.release(address)
    return Figure(allocator.reserved, 70_144 * 2 + 512 + 3072 + 512, "bytes", allowed=1.05)
