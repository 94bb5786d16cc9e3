"""A record's command has no folder of the machine that measured."""

from pathlib import Path

from cairn.bench.record import REPOSITORY, repeatable


def test_paths_are_relative_to_the_repository_or_names(tmp_path: Path):
    inside, outside = REPOSITORY / "benchmarks" / "cpu", tmp_path / "model.gguf"
    args = [str(inside), f"--judge={outside}", "--rows", "a/b", "--scheme=w4a16", "--out", "x.json"]
    expected = "cairn bench benchmarks/cpu --judge=model.gguf --rows a/b --scheme=w4a16"
    assert repeatable(["bench"], args) == expected
