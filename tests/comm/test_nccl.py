"""NCCL's model against public sweeps, and the file for its tuner plugin as that plugin reads it."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.comm import nccl_tuner
from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.nccl_model import (
    FABRICS,
    NCCL_COLLECTIVES,
    UNCALIBRATED,
    NcclCalibration,
    calibrate,
    choose,
    cluster_of,
    median_error,
    times,
)
from cairn.comm.nccl_tests import SweepPoint, read_sweep, read_sweeps
from cairn.comm.published import ALL_REDUCE, PublishedSweep
from cairn.comm.validate import validate
from cairn.core.errors import ConfigError, DataError

MIB = 1 << 20
TABLE = """\
# nccl-tests version 2.19.6
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
       32768          8192     float     sum      -1    39.80    0.82    1.44       0    39.20    0.84    1.46       0
     1048576        262144     float     sum      -1    45.95   22.82   39.93       0    45.01   23.30   40.77       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 20.6
"""


def of(sweep: PublishedSweep):
    return cluster_of(sweep.fabric, sweep.gpus, sweep.nodes, sweep.nic_gb_per_s)


@pytest.mark.parametrize("sweep", ALL_REDUCE, ids=lambda sweep: sweep.name)
def test_three_constants_bring_the_model_within_a_tenth_of_what_was_published(sweep):
    cluster = of(sweep)
    found, error = calibrate(cluster, sweep.points)
    assert error <= 0.10
    gaps = sorted(
        abs(choose(cluster, "all_reduce", point.bytes, found).us - point.us) / point.us
        for point in sweep.points
    )
    middle = gaps[(len(gaps) - 1) // 2 : len(gaps) // 2 + 1]
    assert error == pytest.approx(sum(middle) / len(middle))
    assert error <= median_error(cluster, sweep.points, UNCALIBRATED)


@pytest.mark.parametrize("sweep", ALL_REDUCE, ids=lambda sweep: sweep.name)
def test_sizes_that_were_not_measured_are_predicted(sweep):
    """Each point is judged by a calibration that has not seen it."""
    found = validate(sweep)
    assert found.held_out <= 0.10
    assert found.calibrated <= found.uncalibrated
    assert [row.published_us for row in found.rows] == [point.us for point in sweep.points]
    assert found.worst == max(abs(row.predicted_us / row.published_us - 1) for row in found.rows)


def test_the_switch_from_ll_to_nvls_is_where_it_was_seen():
    """8 x H200: NVLS from 2 MiB on; the model may be a factor two away."""
    cluster = cluster_of("h200", 8)
    first = next(
        size
        for size in (1 << p for p in range(10, 34))
        if choose(cluster, "all_reduce", size).algorithm == "nvls"
    )
    assert MIB <= first <= 4 * MIB


def test_without_calibration_the_figures_are_those_of_the_tuner():
    """By hand: ring/LL on 8 x H200: 6.6 us + 14 hops of 0.6; 141 GB/s of bus is 8/14 of it."""
    cluster = cluster_of("h200", 8)
    rows = {(row.algorithm, row.protocol): row.us for row in times(cluster, "all_reduce", MIB)}
    assert rows["ring", "ll"] == pytest.approx(6.6 + 14 * 0.6 + MIB / (1e3 * 141 * 8 / 14))
    assert rows["ring", "simple"] == pytest.approx(8.4 + 14 * 3.4 + MIB / (1e3 * 360 * 8 / 14))
    assert rows["ring", "ll128"] == pytest.approx(14 + 14 * 1.9 + MIB / (1e3 * 331.2 * 8 / 14))
    assert rows["nvls", "simple"] == pytest.approx(25 + MIB / (1e3 * 2 * 7 * 45 * 0.85 * 8 / 14))


def test_algorithms_appear_where_nccl_has_them():
    def algorithms(collective, *cluster):
        return {row.algorithm for row in times(cluster_of(*cluster), collective, MIB)}

    assert algorithms("all_reduce", "a100", 8) == {"ring", "tree"}
    assert algorithms("all_reduce", "h200", 8) == {"ring", "tree", "nvls"}
    assert algorithms("all_reduce", "h200", 2) == {"ring", "tree"}
    assert algorithms("all_reduce", "h200", 8, 4) == {"ring", "tree", "nvls_tree"}
    assert algorithms("all_gather", "h200", 8, 4) == {"ring"}
    assert algorithms("all_gather", "h200", 1, 64) == {"ring", "pat"}
    assert algorithms("broadcast", "h200", 8, 4) == {"ring"}


def test_trees_win_small_messages_on_many_nodes_and_rings_lose_their_latency():
    cluster = cluster_of("h100", 8, 64)
    assert choose(cluster, "all_reduce", 8 << 10).algorithm == "tree"
    assert choose(cluster, "all_reduce", 4 << 30).algorithm in ("ring", "nvls_tree")


@given(
    fabric=st.sampled_from(sorted(FABRICS)),
    gpus=st.integers(1, 72),
    nodes=st.integers(1, 64),
    launch=st.floats(0, 100),
    scale=st.floats(0.2, 2),
)
def test_the_plugin_finds_a_rule_for_every_size(fabric, gpus, nodes, launch, scale):
    if gpus * nodes < 2:
        gpus = 2
    cluster = cluster_of(fabric, gpus, nodes)
    calibration = NcclCalibration(launch_us=launch, scale=scale)
    rules = nccl_tuner.rules(cluster, calibration, 1 << 33)
    rows = nccl_tuner.read(nccl_tuner.render(cluster, rules))
    assert len(rows) == len(rules)
    for collective in NCCL_COLLECTIVES:
        mine = [row for row in rows if row[0] == nccl_tuner.NAMES[collective]]
        *chosen, fallback = mine
        assert chosen[0][1] == 0
        assert chosen[-1][2] == nccl_tuner.LAST_BYTE
        assert all(b[1] == a[2] + 1 for a, b in itertools.pairwise(chosen))
        assert fallback[1:5] == (0, nccl_tuner.LAST_BYTE, "ring", "simple")
        assert all(row[5] >= 1 for row in mine)  # -1 would leave one channel
        assert {row[6:] for row in mine} == {(nodes, gpus * nodes, -1, -1)}
        sizes = [1 << power for power in range(8, 34)]
        for size in sizes:
            first = next(row for row in mine if row[1] <= size <= row[2])
            assert first[3:5] == (
                (best := choose(cluster, collective, size, calibration)).algorithm,
                best.protocol,
            )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("all_reduce,0,1,ring,ll,1,1,8", "unknown 'all_reduce'"),
        ("allreduce,0,1,Ring,ll,1,1,8", "unknown 'Ring'"),
        ("allreduce,0,1,ring,LL,1,1,8", "unknown 'LL'"),
        ("allreduce,0,1,ring,ll,1,1", "7 fields"),
        ("allreduce,0,x,ring,ll,1,1,8", "invalid literal"),
        ("colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks", "unknown"),
    ],
)
def test_what_the_plugin_would_misread_is_an_error(line, message):
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        nccl_tuner.read(f"# rules\n{line}\n")
    assert nccl_tuner.read("allreduce, 0 ,9,ring,ll,1,-1,-1,2\n") == [
        ("allreduce", 0, 9, "ring", "ll", 1, -1, -1, 2, -1)
    ]


def test_sweeps_are_read_from_the_table_and_from_json(tmp_path):
    table, document = tmp_path / "out.txt", tmp_path / "out.json"
    table.write_text(TABLE)
    rows = [{"size": s, "out_of_place": {"time": t}} for s, t in ((1048576, 45.95), (32768, 39.8))]
    document.write_text(json.dumps({"results": rows}))
    wanted = [SweepPoint(32768, 39.8), SweepPoint(1048576, 45.95)]
    assert read_sweep(table) == read_sweep(document) == wanted


def test_a_sweep_of_another_collective_is_refused(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text(TABLE + "# Collective test concluded: all_reduce_perf\n")
    assert len(read_sweep(path)) == 2
    path.write_text(TABLE + "# Collective test concluded: all_gather_perf\n")
    with pytest.raises(DataError, match="a sweep of all_gather_perf"):
        read_sweep(path)


def test_several_sweeps_in_one_file_are_kept_apart(tmp_path):
    """What `cairn comm bench` writes for two backends, with both forms, and with the columns of -I."""
    heads = "# Collective test starting: all_gather_perf\n"
    row = "{size:12d} 256 float none -1 {us:7.2f} 0.02 0.02 {wrong} {more}{us:7.2f} 0.02 0.02 {also} {more}\n"
    for more in ("", "1.0 9.0 8.0 3.0 "):
        text = heads
        for backend, factor in (("gloo", 3.0), ("cairn", 1.0)):
            text += f"# backend: {backend}\n"
            for size in (1024, 4096, 1024):
                bad = 7 if (backend, size) == ("cairn", 4096) else 0
                text += row.format(
                    size=size, us=factor * size / 100, wrong="N/A", also=bad, more=more
                )
        path = tmp_path / "both.txt"
        path.write_text(text + "# Collective test concluded: all_gather_perf\n")
        gloo, cairn = read_sweeps(path)
        assert (gloo.label, cairn.label) == ("gloo", "cairn")
        assert gloo.points == [SweepPoint(1024, 30.72), SweepPoint(4096, 122.88)]
        assert cairn.points == [SweepPoint(1024, 10.24), SweepPoint(4096, 40.96)]
        if more:  # i_min
            assert {point.us for point in cairn.least} == {1.0}
        else:
            assert cairn.least == cairn.points
        assert gloo.wrong == []
        assert cairn.wrong == ["4096 bytes: 7 wrong values"]
    path.write_text(text.replace("all_gather", "all_reduce"))
    with pytest.raises(DataError, match="several sweeps: gloo, cairn"):
        read_sweep(path)


def test_one_bad_iteration_is_no_dip(tmp_path):
    """The mean of a small size is spoilt, what it takes at best is not; where both are slow, it is said."""
    row = "{size:12d} 1 float sum -1 {us} 1 1 0 {best} {us} 9 9 {us} 1 1 0 {best} {us} 9 9\n"
    path = tmp_path / "sweep.txt"
    for best, said in ((20.0, []), (5000.0, ["slow network"])):
        sizes = [(1024, 9000.0, best), *((1024 << k, 30.0 + k, 25.0 + k) for k in range(1, 6))]
        rows = "".join(row.format(size=size, us=us, best=least) for size, us, least in sizes)
        path.write_text("# nccl-tests\n" + rows)
        assert [one.cause for one in diagnose([path]).findings] == said


def test_wrong_values_in_json_are_seen(tmp_path):
    def form(wrong):
        return {"time": 10.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": wrong}

    rows = [
        {
            "size": 1024,
            "type": "float",
            "redop": "sum",
            "out_of_place": form(0),
            "in_place": form(2),
        },
        {"size": 2048, "type": "float", "redop": "sum", "out_of_place": form(0), "in_place": None},
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"args": ["/usr/bin/all_gather_perf"], "results": rows}))
    (sweep,) = read_sweeps(path)
    assert (sweep.test, sweep.wrong) == ("all_gather_perf", ["1024 bytes: 2 wrong values"])
    (finding,) = diagnose([path]).findings
    assert finding.cause == "wrong result"


@pytest.mark.parametrize("text", ["", "{", '{"results": [{}]}', "# nothing but comments\n", "\xff"])
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text):
    path = tmp_path / "out"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError):
        read_sweep(path)
    with pytest.raises(DataError, match="cannot read"):
        read_sweep(tmp_path / "absent")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (("h300", 8), "unknown fabric"),
        (("h200", 1), "nothing to exchange"),
        (("h200", 8, 0), "nothing to exchange"),
        (("h200", 8, 2, 0.0), "0.0 GB/s"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(cluster, message):
    with pytest.raises(ConfigError, match=message):
        cluster_of(*cluster)
    with pytest.raises(ConfigError, match="cannot calibrate"):
        calibrate(cluster_of("h200", 8), [SweepPoint(1, 1.0)])


def test_bus_bandwidth_never_exceeds_what_the_wires_have():
    for fabric in ("a100", "h200", "b200"):
        cluster = cluster_of(fabric, 8, 4)
        wire = np.array([choose(cluster, "all_gather", 1 << p).us for p in range(20, 36)])
        size = 2.0 ** np.arange(20, 36)
        assert (size / wire / 1e3 * 31 / 32 <= 8 * 50.0 + 1e-6).all()
