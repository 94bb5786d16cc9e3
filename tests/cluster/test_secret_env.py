"""Tokens of a job stand in no file that others may read, and in no Kubernetes object but a Secret."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cluster import records
from cairn.cluster.backends.kubernetes import TARGETS, Kubernetes, objects
from cairn.cluster.resolve import resolve
from cairn.cluster.secret_env import is_secret, write_private
from cairn.cluster.spec import Job, Role

TOKEN = "hf_abcdefghijklmnop"


def job():
    env = {"HF_TOKEN": TOKEN, "CAIRN_JOB_SECRET": TOKEN, "NCCL_DEBUG": "INFO"}
    role = Role(name="worker", argv=["cairn", "train"], nodes=2, image="cairn:1", env=env)
    return Job(name="private", roles=[role])


@pytest.mark.parametrize("target", TARGETS)
def test_kubernetes_gets_secrets_by_reference(target):
    plan = resolve(job(), Kubernetes(target).unseen())
    secret, *others = objects(plan, target)
    assert (secret["kind"], secret["stringData"]) == (
        "Secret",
        {"CAIRN_JOB_SECRET": TOKEN, "HF_TOKEN": TOKEN},
    )
    assert TOKEN not in str(others)
    key = {"name": secret["metadata"]["name"], "key": "HF_TOKEN"}
    assert str({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}}) in str(others)
    assert "'INFO'" in str(others)


def test_only_the_owner_reads_what_was_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_JOBS", str(tmp_path))
    before = os.umask(0)
    try:
        record = records.create(job(), "local")
    finally:
        os.umask(before)
    assert stat.S_IMODE(record.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((record.folder / "job.toml").stat().st_mode) == 0o600
    assert TOKEN in (record.folder / "job.toml").read_text()
    path = tmp_path / "plan.json"
    path.write_text("what was there before")
    path.chmod(0o644)
    write_private(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)


@given(st.sampled_from(["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "DB_PASSWORD"]))
def test_names_of_secrets(name):
    assert is_secret(name)
    assert is_secret(f"MY_{name}")
    assert not any(map(is_secret, ("NCCL_DEBUG", "OMP_NUM_THREADS", "KEYBOARD", "PATH")))
