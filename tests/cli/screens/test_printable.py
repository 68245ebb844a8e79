"""Nothing that a name, path, record or log holds reaches the terminal as an escape sequence."""

import contextlib
import io
import sys

import pytest

from hires.cli.screens.printable import behind, printable_output

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202etxt.exe\u2066\u200b\x00\r\ud800\u2028"
UNSEEN = set("\x1b\x07\x9b\u202e\u2066\u200b\x00\r\ud800\u2028")


def printed(*texts: str) -> str:
    """Returns what reaches the terminal of some texts."""
    with contextlib.redirect_stdout(io.StringIO()) as screen, printable_output():
        for text in texts:
            sys.stdout.write(text)
    return screen.getvalue()


def test_what_a_terminal_would_obey_is_replaced():
    text = printed(f"a\tb {HOSTILE}", "\nnext\n")
    assert not UNSEEN & set(text)
    assert text.startswith("a\tb \N{REPLACEMENT CHARACTER}]0;owned")
    assert text.endswith("\nnext\n")


def test_letters_of_all_languages_stay():
    text = "Größe 画像 µs ─ 1\u00a0000 \N{MULTIPLICATION SIGN} é e\u0301\n"
    assert printed(text) == text


def test_hires_itself_draws_behind_it():
    with contextlib.redirect_stdout(io.StringIO()) as screen, printable_output():
        with printable_output():
            behind(sys.stdout).write("\x1b[H")
        assert sys.stdout.isatty() is False
    assert screen.getvalue() == "\x1b[H"


@pytest.mark.parametrize(
    "words",
    [
        ("run", f"campaign={HOSTILE}"),
        ("run", f"model={HOSTILE}"),
        ("plan", f"{HOSTILE}=1"),
        ("show", HOSTILE),
        ("report", HOSTILE),
        ("status", HOSTILE),
        ("logs", HOSTILE),
        ("compare", HOSTILE, HOSTILE),
        ("list", HOSTILE),
        ("list", "runs", "--where", HOSTILE),
        ("data", "make", HOSTILE, "--size", HOSTILE),
        (HOSTILE,),
        (f"--{HOSTILE}",),
        ("show", "x" * 300),
        ("run", "campaign=" + "x" * 300),
        ("run", "experiment=" + "x" * 300),
        ("report", "y" * 5000),
        ("show", "a\0b"),
        ("status", "--results", "a\0b"),
        ("list", "runs", "--results", "z" * 300),
        ("index", "--results", "z" * 300),
    ],
)
def test_words_of_the_command_line(hires, words):
    answer = hires(*words)
    assert answer.code in range(5)
    assert not UNSEEN & set(answer.out + answer.err)
    assert "Traceback" not in answer.err
