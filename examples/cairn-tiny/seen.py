"""Which of the sums that evaluate.py asks were in the training data? A card without this would flatter.

    python seen.py corpus --out seen.json

Reads what assemble.py wrote. A sum counts as seen if its equation is there, in either order of its two numbers.
"""

import argparse
import json
import re
from pathlib import Path

from evaluate import SUMS, drawn

EQUATION = re.compile(r"(?<!\d)(\d+) ([+*-]) (\d+) = ")
ASKED = {
    "add_two_digits": ("+", 10, 99),
    "subtract_two_digits": ("-", 10, 99),
    "add_one_digit": ("+", 0, 9),
    "add_three_digits": ("+", 100, 999),
    "times_up_to_12": ("*", 2, 12),
}

Sum = tuple[int, str, int]


def equations(corpus: Path) -> set[Sum]:
    found: set[Sum] = set()
    for name in ("text/sums.jsonl", "chats.jsonl"):
        with (corpus / name).open(encoding="utf-8") as file:
            for line in file:
                found |= {(int(a), sign, int(b)) for a, sign, b in EQUATION.findall(line)}
    return found


def was_seen(found: set[Sum], a: int, sign: str, b: int) -> bool:
    return (a, sign, b) in found or (sign != "-" and (b, sign, a) in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = equations(options.corpus)
    two = [(a, b) for a, sign, b in found if sign == "+" and {a, b} <= {*range(10, 100)}]
    result: dict[str, int] = {"two_digit_additions": 8100, "two_digit_additions_seen": len(two)}
    for name, (sign, low, high) in ASKED.items():
        asked = drawn(sign, low, high)
        result[name] = sum(was_seen(found, a, sign, b) for a, b in asked)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"of {SUMS} each: {result}")


if __name__ == "__main__":
    main()
