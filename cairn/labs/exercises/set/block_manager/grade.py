import random

from cairn.labs.exercises.grading import Attempt, Figure, case, equal, require


@case("a page for each block_size tokens", "每 block_size 个 token 一页")
def pages(attempt: Attempt) -> None:
    manager = attempt.BlockManager(8, 4)
    for count in range(1, 18):
        manager.append("a")
        equal(len(manager.tables["a"]), -(-count // 4))
    equal(len(manager.free), 3)


@case("a fork shares, and copies before it writes", "fork 先共享，写前复制")
def forks(attempt: Attempt) -> None:
    manager = attempt.BlockManager(8, 4)
    for _ in range(6):
        manager.append("a")
    manager.fork("a", "b")
    equal(manager.tables["a"], manager.tables["b"])
    equal(len(manager.free), 6)
    old = manager.tables["a"][-1]
    copy = manager.append("b")
    require(copy is not None and copy[0] == old, "no copy before a write", "写前没有复制")
    equal(manager.tables["b"][-1], copy[1])
    equal(manager.tables["b"][0], manager.tables["a"][0])
    equal(manager.append("a"), None)  # no other sequence shares it any more


@case("nothing is lost or handed out twice", "不泄漏，也不重复分配")
def conserved(attempt: Attempt) -> None:
    dice, manager, names = random.Random(3), attempt.BlockManager(24, 3), []
    for number in range(600):
        kind = dice.random()
        if names and kind < 0.15:
            manager.release(names.pop(dice.randrange(len(names))))
        elif names and kind < 0.3:
            manager.fork(dice.choice(names), f"s{number}")
            names.append(f"s{number}")
        else:
            name = dice.choice(names) if names and kind < 0.9 else f"s{number}"
            try:
                manager.append(name)
            except attempt.OutOfBlocks:
                if names:
                    manager.release(names.pop(0))
                continue
            if name not in names:
                names.append(name)
        used = [page for name in names for page in manager.tables[name]]
        counts = [used.count(page) for page in range(24)]
        equal(manager.references, counts)
        equal(sorted(manager.free), [page for page in range(24) if counts[page] == 0])


@case("out of pages changes nothing", "页不够时状态不变")
def full(attempt: Attempt) -> None:
    manager = attempt.BlockManager(1, 2)
    manager.append("a")
    manager.append("a")
    try:
        manager.append("a")
    except attempt.OutOfBlocks:
        equal((manager.lengths["a"], manager.tables["a"]), (2, [0]))
        return
    require(False, "a third token got a page that is not there", "第三个 token 得到了不存在的页")


@case("slots wasted by 50 sequences", "50 条序列浪费的槽位")
def waste(attempt: Attempt) -> Figure:
    dice, manager = random.Random(5), attempt.BlockManager(2000, 16)
    lengths = [dice.randrange(1, 300) for _ in range(50)]
    for number, length in enumerate(lengths):
        for _ in range(length):
            manager.append(str(number))
    used = sum(len(table) for table in manager.tables.values()) * 16
    return Figure(used, sum(-(-length // 16) * 16 for length in lengths), "slots")
