"""`cairn bench comm --transfer`: a small run of the real measurement, and what it says to mistakes."""

import json

import pytest

from cairn.bench import transfer
from cairn.cli.main import main
from cairn.comm.transfer import nixl
from cairn.comm.transfer.kv import KVContents


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transfer, "RUN_BYTES", (256, 65536))
    monkeypatch.setattr(transfer, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(transfer, "TOKENS", 128)
    monkeypatch.setattr(transfer, "MODEL", KVContents(model="m", layers=2, kv_heads=2, width=8))


def test_a_small_run(small, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(nixl, "why_not", lambda: "NIXL is not installed (for this test)")
    out = tmp_path / "transfer.json"
    words = ["bench", "comm", "--transfer", "--transports", "tcp,nixl", "--repeats", "1"]
    assert main([*words, "--json", "--out", str(out), "--commit", "abc"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["skipped"] == {"nixl": "NIXL is not installed (for this test)"}
    assert printed["origin"]["commit"] == "abc"
    moves = {(row["transport"], row["way"], row["run_bytes"]) for row in printed["moves"]}
    assert moves == {
        (kind, way, size)
        for kind, way in (("memcpy", "copy"), ("tcp", "read"), ("tcp", "write"))
        for size in (256, 65536)
    }
    assert len(printed["hand_overs"]) == len(transfer.layouts())
    assert printed["streamed"][0]["transport"] == "tcp"
    assert printed["deaths"][0]["killed_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "cairn bench comm --transfer"),
        (["--transfer", "--transports", "tpc"], "did you mean 'tcp'?"),
        (["--transfer", "--transports", ","], "names none"),
        (["--transfer", "--repeats", "0"], "at least 1"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["bench", "comm", *words]) == 2
    assert message in capsys.readouterr().err
