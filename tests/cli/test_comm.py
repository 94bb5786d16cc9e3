"""`cairn comm`: proofs as a table and as JSON, a status that says whether all is well, no torch."""

import json
import subprocess
import sys

import pytest

from cairn.cli.comm import comm as verb
from cairn.comm import nccl_tuner, validate
from cairn.comm.published import ALL_REDUCE
from cairn.comm.schedule import catalogue
from cairn.comm.schedule.catalogue import names
from cairn.core.errors import ConfigError, DataError, UsageError


def document(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_verify_all_proves_every_schedule(capsys):
    assert verb.run(["verify", "--all", "--ranks", "2..5,9", "--json"]) == 0
    found = document(capsys)
    assert found["ok"]
    assert [(row["collective"], row["schedule"]) for row in found["schedules"]] == names()
    for row in found["schedules"]:
        assert [proof["ranks"] for proof in row["proofs"]] == [2, 3, 4, 5, 9]
        assert all(proof["times_bound"] >= 1 - 1e-9 for proof in row["proofs"])


def test_names_choose_and_show_prints_what_every_rank_does(capsys):
    assert verb.run(["verify", "all_gather/ring", "--ranks", "3", "--show"]) == 0
    out = capsys.readouterr().out
    assert "rank 0 channel 0: send 0 -> 1, recv 2 <- 2, send 2 -> 1, recv 1 <- 2" in out
    assert "1 proved" in out
    assert verb.run(["verify", "ring", "broadcast", "--ranks", "4", "--json"]) == 0
    chosen = {(row["collective"], row["schedule"]) for row in document(capsys)["schedules"]}
    assert chosen == {pair for pair in names() if pair[1] == "ring" or pair[0] == "broadcast"}


def test_a_schedule_that_is_wrong_makes_the_status_one(monkeypatch, capsys):
    gather = catalogue.GATHERS["ring"]
    monkeypatch.setitem(
        catalogue.GATHERS, "ring", lambda s: gather(s._replace(ranks=s.ranks)).split(2)
    )
    assert verb.run(["verify", "all_gather/ring", "--ranks", "4"]) == 1
    assert "1 of 1 not proved" in capsys.readouterr().out
    assert verb.run(["verify", "all_gather/ring", "--ranks", "4", "--json"]) == 1
    assert document(capsys)["schedules"][0]["proofs"][0]["problem"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["verify"], "takes names or --all"),
        (["verify", "--all", "ring"], "takes names or --all"),
        (["verify", "rign"], "no schedule 'rign'"),
        (["verify", "ring", "--ranks", "2..x"], "cannot read the numbers of ranks '2..x'"),
        (["verify", "ring", "--ranks", "9..2"], "no range of ranks"),
        (["verify", "ring", "--ranks", "100000"], "no range of ranks"),
        (["prove"], "has no 'prove'"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(UsageError, match=message):
        verb.run(args)


def test_tune_prints_writes_and_calibrates(tmp_path, capsys):
    assert verb.run(["tune", "--gpus", "8"]) == 0
    assert nccl_tuner.read(capsys.readouterr().out)
    sweep, out = tmp_path / "sweep.txt", tmp_path / "nccl_tuner.conf"
    h200 = next(sweep for sweep in ALL_REDUCE if sweep.name == "8 x H200")
    sweep.write_text(
        "".join(f"{p.bytes} {p.bytes // 4} float sum -1 {p.us:.2f} 0 0 0\n" for p in h200.points)
    )
    args = ["tune", "--measured", str(sweep), "--out", str(out), "--json"]
    assert verb.run(args) == 0
    found = document(capsys)
    assert found["median_error"] < 0.1
    assert found["calibration"]["launch_us"] > 5
    assert len(nccl_tuner.read(out.read_text())) == len(found["rules"])
    assert verb.run(["tune", "--out", str(out)]) == 0
    assert "all_reduce" in capsys.readouterr().out


def test_published_shows_how_far_off_the_model_is(monkeypatch, capsys):
    monkeypatch.setattr(validate, "ALL_REDUCE", ALL_REDUCE[-2:])  # the shortest two
    assert verb.run(["tune", "--published", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found] == [sweep.name for sweep in ALL_REDUCE[-2:]]
    assert all(row["calibrated"] <= 0.10 and len(row["rows"]) == 6 for row in found)
    assert verb.run(["tune", "--published"]) == 0
    assert "GB200, 20 x 72 GPUs" in capsys.readouterr().out


def test_tune_refuses_what_it_cannot_use(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        verb.run(["tune", "--measured", str(tmp_path / "absent")])
    with pytest.raises(ConfigError, match="nothing to exchange"):
        verb.run(["tune", "--gpus", "1"])


def test_neither_help_nor_proofs_need_torch():
    code = (
        "import sys; from cairn.cli.main import main\n"
        "assert main(['comm', '--help']) == 0\n"
        "assert main(['comm', 'verify', 'ring', '--ranks', '4']) == 0\n"
        "assert main(['comm', 'tune', '--gpus', '8']) == 0\n"
        "import cairn.comm.cost\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verify" in done.stdout
