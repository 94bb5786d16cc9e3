"""Two threads on one loop: what does OpenMP give, and what takes it away? A small C program, compiled here.

    counters side by side      thread 0 | thread 1 in one 64-byte line: the line travels at every write
    counters a line apart      no line is shared
    schedule(static)           a triangular loop: the second half has 3/4 of the work
    schedule(dynamic)          chunks from a queue: both have half of it

Predicted from the line and from the loop's shape; timed inside the program, so that starting it costs nothing.
"""

import subprocess
from pathlib import Path

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.needs import c_compiler
from cairn.labs.workbench import Workbench

SOURCE = r"""
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#define STEPS 2000000L
static long counters[64] __attribute__((aligned(64)));
static double count(int apart) {
    double began = omp_get_wtime();
#pragma omp parallel num_threads(2)
    {
        int me = omp_get_thread_num() * apart;
        for (long i = 0; i < STEPS; i++) __atomic_fetch_add(&counters[me], 1, __ATOMIC_RELAXED);
    }
    return omp_get_wtime() - began;
}
static double work(long n) { double s = 0; for (long i = 0; i < n; i++) s += 1.0 / (1 + i); return s; }
static double triangle(int dynamic, long rows, double *sum) {
    double began = omp_get_wtime(), s = 0;
    omp_set_schedule(dynamic ? omp_sched_dynamic : omp_sched_static, dynamic ? 8 : 0);
#pragma omp parallel for schedule(runtime) reduction(+:s) num_threads(2)
    for (long row = 0; row < rows; row++) s += work(row);
    *sum = s;
    return omp_get_wtime() - began;
}
int main(int argc, char **argv) {
    long rows = atol(argv[1]);
    double near = 1e9, far = 1e9, fixed = 1e9, queue = 1e9, a, b;
    for (int again = 0; again < atoi(argv[2]); again++) {
        double t;
        if ((t = count(1)) < near) near = t;
        if ((t = count(16)) < far) far = t;
        if ((t = triangle(0, rows, &a)) < fixed) fixed = t;
        if ((t = triangle(1, rows, &b)) < queue) queue = t;
    }
    printf("%.9f %.9f %.9f %.9f %.9g\n", near, far, fixed, queue, (a - b) / a);
    return 0;
}
"""


def run(bench: Workbench) -> Outcome:
    bench.step("compiling with -fopenmp")
    program = compiled(bench.folder)
    bench.step("counters and a triangular loop on two threads")
    found = measured(program, bench.pick(6000, 3000), bench.pick(7, 4))
    near, far, fixed, queue, apart = found
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "counters in one line over counters a line apart",
                    "同一 line 的计数器与分开的耗时比",
                ),
                predicted=1.5,
                measured=near / far,
                unit="x",
                kind="at_least",
            ),
            Check(
                what=Words(
                    "triangular loop, static over dynamic", "三角形循环：static 与 dynamic 之比"
                ),
                predicted=static_over_dynamic(2),
                measured=fixed / queue,
                unit="x",
                within=0.2,
            ),
            Check(
                what=Words("relative difference of the two sums", "两个求和的相对差"),
                predicted=1e-9,
                measured=abs(apart),
                unit="",
                kind="at_most",
            ),
        ],
        table=Table(
            columns=[Words("what", "内容"), Words("ms", "毫秒")],
            rows=[
                ["counters in one line", near * 1e3],
                ["counters a line apart", far * 1e3],
                ["triangle, static", fixed * 1e3],
                ["triangle, dynamic", queue * 1e3],
            ],
        ),
    )


def static_over_dynamic(threads: int) -> float:
    """The last of n equal blocks of a triangle has 1 - (1 - 1/n)^2 of it, where 1/n would be fair."""
    return (1 - (1 - 1 / threads) ** 2) * threads


def compiled(folder: Path) -> Path:
    source, program = folder / "threads.c", folder / "threads"
    source.write_text(SOURCE)
    compiler = c_compiler() or "cc"
    subprocess.run(
        [compiler, "-O2", "-fopenmp", str(source), "-o", str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return program


def measured(program: Path, rows: int, repeats: int) -> tuple[float, float, float, float, float]:
    """Seconds: near, far, static, dynamic; and how far the two sums are apart."""
    done = subprocess.run(
        [str(program), str(rows), str(repeats)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    near, far, fixed, queue, apart = map(float, done.stdout.split())
    return near, far, fixed, queue, apart


LAB = described(__file__, run)
