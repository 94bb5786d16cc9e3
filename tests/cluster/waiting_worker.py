"""A program of the placement tests: says that it is there, and waits for the file `finish`. Needs nothing but Python.

python waiting_worker.py FOLDER      FOLDER/up-PID holds the node it runs on; FOLDER/fail makes it fail
"""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
fresh = folder / f".up-{os.getpid()}"
fresh.write_text(os.environ.get("CAIRN_NODE", "?"))
fresh.replace(folder / f"up-{os.getpid()}")
print("up on", os.environ.get("CAIRN_NODE"), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
while not (folder / "finish").exists():
    if (folder / "fail").exists():
        raise RuntimeError("told to fail")
    time.sleep(0.05)
