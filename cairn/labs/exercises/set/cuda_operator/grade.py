import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from cairn.labs.exercises.exercise import find_exercise
from cairn.labs.exercises.grading import Attempt, Figure, NotHere, case, close, require
from cairn.labs.exercises.speed import beside, require_gpu

# What a host does around the kernel; with nvcc the call is rmsnorm<<<rows, THREADS>>>(...).
HOST = """
extern "C" int run(const float *x, const float *weight, float *out, int rows, int columns, float eps) {
    return on_cpu::launch(rows, THREADS, [=] { rmsnorm(x, weight, out, columns, eps); });
}
"""
BUILT: dict[Path, ctypes.CDLL] = {}


def library(file: Path) -> ctypes.CDLL:
    if file not in BUILT:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        require(compiler, "there is no C++ compiler here", "本机没有 C++ 编译器")
        header = find_exercise("cuda-operator").grade.with_name("cuda_on_cpu.h")
        source, shared_object = file.with_suffix(".host.cpp"), file.with_suffix(".so")
        source.write_text(f'#include "{header}"\n#include "{file}"\n{HOST}', encoding="utf-8")
        flags = ["-std=c++17", "-O0", "-shared", "-fPIC"]
        command = [str(compiler), *flags, str(source), "-o", str(shared_object)]
        process = subprocess.run(command, capture_output=True, text=True)
        errors = process.stderr[:400]
        require(process.returncode == 0, f"it does not compile: {errors}", f"无法编译：{errors}")
        BUILT[file] = ctypes.CDLL(str(shared_object))
    return BUILT[file]


def run(file: Path, x_MN: torch.Tensor, weight_N: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out_MN = torch.full_like(x_MN, 7.0)
    rows, columns = x_MN.shape
    addresses = [ctypes.c_void_p(one.data_ptr()) for one in (x_MN, weight_N, out_MN)]
    wrong = library(file).run(*addresses, rows, columns, ctypes.c_float(eps))
    require(
        wrong == 0,
        "some threads wait at a barrier that the others never reach: a GPU would hang",
        "部分线程在屏障处等待，其他线程不会到达：GPU 会挂起",
    )
    return out_MN


def problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x_MN, weight_N = torch.randn(rows, columns), torch.rand(columns) + 0.5
    wanted_MN = x_MN * torch.rsqrt(x_MN.square().mean(-1, keepdim=True) + 1e-6) * weight_N
    return x_MN, weight_N, wanted_MN


@case(
    "it compiles, and one row of one number per thread is right", "能编译；每线程一个数的一行正确"
)
def one_row(attempt: Attempt) -> None:
    x_MN, weight_N, wanted_MN = problem(1, 64)
    close(run(attempt, x_MN, weight_N), wanted_MN)


@case("several rows, each block its own", "多行：每个 block 一行")
def rows(attempt: Attempt) -> None:
    x_MN, weight_N, wanted_MN = problem(5, 256)
    close(run(attempt, x_MN, weight_N), wanted_MN)


@case(
    "columns that are no multiple of the threads, and fewer than them",
    "列数不是线程数的倍数，或更少",
)
def ragged(attempt: Attempt) -> None:
    for columns in (100, 17, 1):
        x_MN, weight_N, wanted_MN = problem(3, columns)
        close(run(attempt, x_MN, weight_N), wanted_MN)


@case("a row of zeros stays finite", "全零行不产生非有限值")
def zeros(attempt: Attempt) -> None:
    close(run(attempt, torch.zeros(2, 64), torch.ones(64)), torch.zeros(2, 64))


LAUNCH = """
extern "C" int run(const float *x, const float *weight, float *out, int rows, int columns, float eps) {
    rmsnorm<<<rows, THREADS>>>(x, weight, out, columns, eps);
    return cudaGetLastError();
}
"""
NVCC = shutil.which("nvcc")


def gpu_library(file: Path) -> ctypes.CDLL:
    """The same file built by nvcc."""
    shared_object = file.with_suffix(".gpu.so")
    if shared_object not in BUILT:
        source = file.with_suffix(".gpu.cu")
        source.write_text(f'#include "{file}"\n{LAUNCH}', encoding="utf-8")
        flags = ["-O2", "-arch=native", "-shared", "-Xcompiler", "-fPIC"]
        process = subprocess.run(
            [str(NVCC), *flags, str(source), "-o", str(shared_object)],
            capture_output=True,
            text=True,
        )
        errors = process.stderr[:400]
        require(process.returncode == 0, f"nvcc refuses it: {errors}", f"nvcc 无法编译：{errors}")
        BUILT[shared_object] = ctypes.CDLL(str(shared_object))
    return BUILT[shared_object]


def launch(file: Path, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    addresses = [ctypes.c_void_p(one.data_ptr()) for one in (x, weight, out)]
    status = gpu_library(file).run(*addresses, *x.shape, ctypes.c_float(1e-6))
    require(status == 0, f"CUDA says error {status}", f"CUDA 返回错误 {status}")


def require_nvcc() -> None:
    require_gpu()
    if NVCC is None:
        raise NotHere(
            "not looked at: nvcc is not on the PATH (CUDA's toolkit has it)",
            "未检查：PATH 中没有 nvcc（CUDA toolkit 自带）",
        )


@case("on this GPU, built by nvcc", "用 nvcc 编译并在本机 GPU 上运行")
def on_gpu(attempt: Attempt) -> None:
    require_nvcc()
    x_MN, weight_N, wanted_MN = problem(129, 1000)
    x, weight = x_MN.cuda(), weight_N.cuda()
    out = torch.full_like(x, 7.0)
    launch(attempt, x, weight, out)
    close(out.cpu(), wanted_MN)


@case("on this GPU, beside a copy of the same bytes", "在本机 GPU 上，与拷贝同样字节相比")
def speed(attempt: Attempt) -> Figure:
    require_nvcc()
    x, weight = torch.randn(16384, 4096, device="cuda"), torch.ones(4096, device="cuda")
    out, copied = torch.empty_like(x), torch.empty_like(x)
    return beside(lambda: launch(attempt, x, weight, out), lambda: copied.copy_(x), allowed=3.0)
