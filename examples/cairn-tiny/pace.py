"""How many steps fit into the time: from the JSON that a trial run of `cairn train --json` printed.

python pace.py trial.json pretrain.toml 140        ->  1250
"""

import json
import sys
import tomllib
from pathlib import Path


def steps_in(tokens_per_s: float, tokens_per_step: int, seconds: float) -> int:
    return max(20, int(tokens_per_s * seconds / tokens_per_step))


def main() -> None:
    trial, recipe, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    data = tomllib.loads(recipe.read_text())["data"]
    speed = json.loads(trial.read_text())["tokens_per_s"]
    print(steps_in(speed, data["sequences"] * data["sequence"], seconds))


if __name__ == "__main__":
    main()
