"""What holds for all verbs: help, mistakes that are said in two lines, the Tab key."""

import functools
import re
import subprocess

import pytest

from cairn import __version__
from cairn.cli.completion import Command, bash, fish, read_commands, zsh
from cairn.cli.main import VERBS, main


@functools.cache
def commands() -> list[Command]:
    return read_commands()


def leaves() -> list[Command]:
    return [command for command in commands() if not command.subverbs]


def test_every_verb_has_help_and_the_version_is_one_line(capsys):
    assert {command.words[0] for command in commands()} == set(VERBS)
    assert all("--help" in command.flags for command in leaves()), leaves()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cairn {__version__}\n"


def test_an_unknown_flag_is_a_mistake_of_every_verb_and_no_bug(capsys):
    for command in commands():
        status = main([*command.words, "--no-such-flag"])
        out, err = capsys.readouterr()
        assert status == 2, (command.words, status, err)
        assert "error:" in err, (command.words, err)
        assert "Traceback" not in out + err, command.words
        assert "no-such-flag" in err, (command.words, err)


def test_an_unknown_subverb_is_said_with_those_that_there_are(capsys):
    for command in commands():
        if command.subverbs:
            nearly = command.subverbs[0] + "x"
            assert main([command.words[0], nearly]) == 2
            err = capsys.readouterr().err
            assert nearly in err, (command.words, err)
            assert command.subverbs[0] in err, (command.words, err)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("comm doctor --selftest --healthy -1", "healthy"),
        ("comm bench broadcast -r 9", "-r 0 to 1"),
        ("comm bench all_reduce --backends nope", "gloo, cairn, nccl"),
        ("comm simulate --gpus 64 --stragglers 99", "from none to all"),
        ("jobs nodes --cordon=", "cordon"),
        ("kernels check --workers 0", "workers"),
        ("kernels build --out o --workers -1", "workers"),
        ("lab run roofline --set n", "--set n=64"),
        ("operator manifests o --namespace Upper_case", "namespace"),
        ("operator manifests o --image=", "image"),
        ("profile serve --scale 0", "--scale"),
        ("simulate fleet --start-s -1", "start_s"),
        ("top --every 0", "every"),
    ],
)
def test_a_value_without_a_meaning_is_refused_at_once(line, flag, capsys):
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert flag in err
    assert "hint:" in err


def test_one_name_for_a_page_on_all_verbs():
    """`--html FILE` writes a page, whatever the verb."""
    flags = {flag for command in commands() for flag in command.flags}
    assert "--html" in flags
    assert not {flag for flag in flags if re.search("page|report$", flag)}


# -- the Tab key ----------------------------------------------------------------------------------


def offered(*words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("cairn", *words))
    asked = f"{bash(commands())}\nCOMP_WORDS=({line}) COMP_CWORD={len(words)}\n_cairn\n"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", asked + show], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_offers_verbs_subverbs_and_flags():
    assert set(VERBS) <= set(offered(""))
    assert offered("la") == ["launch", "lab"]
    assert {"train", "serve"} <= set(offered("plan", ""))
    assert "--rate" in offered("plan", "serve", "--ra")
    assert "--port" in offered("serve", "--p")
    assert "--port" in offered("serve", "MODEL", "--p")
    assert offered("completion", "f") == ["fish"]
    assert offered("serve", "no-such-thing") == []


def test_the_other_shells_name_every_command():
    """zsh and fish are not asked here; what they would read names everything and closes what it opens."""
    for script in (zsh(commands()), fish(commands())):
        for command in commands():
            assert command.words[-1] in script
        assert script.count("'") % 2 == 0
    # zsh runs the file as the function when Tab is first pressed: without this the first one finds nothing.
    assert '_cairn "$@"' in zsh(commands())


@pytest.mark.parametrize("args", [[], ["tcsh"], ["--loud"]])
def test_a_shell_has_to_be_named(args, capsys):
    assert main(["completion", *args]) == 2
    assert "bash, zsh" in capsys.readouterr().err
