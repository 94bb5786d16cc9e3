"""What are the ceilings of this machine? `cairn calibrate`, kept as a record.

python benchmarks/machine.py --out benchmarks/h200/machine.json
"""

import argparse

import msgspec

from cairn.bench.record import add_arguments, record
from cairn.hw.calibrate import calibrate
from cairn.hw.probe import probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    record(msgspec.to_builtins(calibrate(probe())), options)


if __name__ == "__main__":
    main()
