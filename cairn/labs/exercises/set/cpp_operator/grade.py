import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from cairn.labs.exercises.grading import Attempt, case, close, require

BUILT: dict[Path, ctypes.CDLL] = {}


def library(file: Path) -> ctypes.CDLL:
    if file not in BUILT:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        require(compiler, "there is no C++ compiler here", "本机没有 C++ 编译器")
        made = file.with_suffix(".so")
        command = [compiler, "-O1", "-shared", "-fPIC", str(file), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        require(
            done.returncode == 0,
            f"it does not compile: {done.stderr[:300]}",
            f"无法编译：{done.stderr[:300]}",
        )
        BUILT[file] = ctypes.CDLL(str(made))
    return BUILT[file]


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def run(file: Path, gate, up, grad):
    lib, count = library(file), ctypes.c_int64(gate.numel())
    out, grad_gate, grad_up = (torch.zeros_like(gate) for _ in range(3))
    lib.swiglu(address(gate), address(up), address(out), count)
    lib.swiglu_backward(
        address(grad), address(gate), address(up), address(grad_gate), address(grad_up), count
    )
    return out, grad_gate, grad_up


def problem(n=1000):
    torch.manual_seed(0)
    return [torch.randn(n) * 3 for _ in range(3)]


@case("it compiles and the forward agrees with torch", "能编译，前向与 torch 一致")
def forward(attempt: Attempt) -> None:
    gate, up, grad = problem()
    close(run(attempt, gate, up, grad)[0], torch.nn.functional.silu(gate) * up)


@case("the backward agrees with autograd", "反向与 autograd 一致")
def backward(attempt: Attempt) -> None:
    gate, up, grad = problem()
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.silu(g) * u, [g, u], grad)
    found = run(attempt, gate, up, grad)[1:]
    close(found[0], wanted[0])
    close(found[1], wanted[1])


@case("large inputs stay finite", "大输入不溢出")
def large(attempt: Attempt) -> None:
    gate = torch.tensor([-90.0, 0.0, 90.0])
    out, *_ = run(attempt, gate, torch.ones(3), torch.ones(3))
    close(out, torch.nn.functional.silu(gate))
