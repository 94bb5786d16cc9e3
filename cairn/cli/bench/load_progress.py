"""Status line of a load test, updated a few times a second.

8/s poisson  ━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌  212/480  17 in flight  0:33 left
"""

from cairn.bench.serve_bench import LoadProgress
from cairn.report.progress import bar, clock_time


def line(progress: LoadProgress) -> str:
    total = f"/{progress.total}" if progress.total is not None else ""
    left = progress.left_s
    return (
        f"{progress.load}  {bar(progress.share)}  {progress.ended}{total}"
        f"  {progress.in_flight} in flight  {'' if left is None else clock_time(left) + ' left'}"
    ).rstrip()
