"""Describes this machine: collects what every reader of this folder can tell.

`probe` asks every reader of this folder once and returns one `Machine`. It measures nothing and
changes nothing; a machine without a GPU, without NVML, without psutil or inside a container is an
everyday case.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from cairn.hw.gpus import read_gpus
from cairn.hw.host import (
    read_container,
    read_cpu,
    read_kernel,
    read_limits,
    read_memory,
    read_numa,
    read_virtual,
)
from cairn.hw.machine import Machine
from cairn.hw.network import read_fabrics, read_nics
from cairn.hw.storage import cache_folder, read_filesystem
from cairn.hw.versions import read_versions


def probe(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Machine:
    """Everything that can be read under `root` and from the running process; a second or less."""
    environment = os.environ if environment is None else environment
    memory, memory_notes = read_memory(root)
    gpus, gpu_notes = read_gpus(root)
    return Machine(
        cpu=read_cpu(root),
        memory=memory,
        numa=read_numa(root),
        gpus=gpus,
        nics=read_nics(root),
        fabrics=read_fabrics(root),
        cache=read_filesystem(cache_folder(environment), root),
        limits=read_limits(root),
        versions=read_versions(root),
        kernel=read_kernel(root),
        container=read_container(root, environment),
        virtual=read_virtual(root),
        visible_gpus=environment.get("CUDA_VISIBLE_DEVICES"),
        notes=memory_notes + gpu_notes,
    )
