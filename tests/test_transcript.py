"""The comparison of shown with real output accepts what it should, and nothing else."""

import pytest

from tests.transcript import Step, mismatch, parse


def test_parse_finds_commands_and_their_output():
    text = """
    Some words.

        $ python a.py \\
            --flag
        one
        two

    More words.

        $ true
        $ echo x
        x
    """
    assert parse(text) == [
        Step("python a.py \\\n--flag", ["one", "two"]),
        Step("true", []),
        Step("echo x", ["x"]),
    ]


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ([], "anything"),
        (["a", "b"], "a\nb\n"),
        (["took ... s"], "took 1.25 s"),
        (["a", "...", "z"], "a\nb\nc\nz"),
        (["..."], ""),
        (["[w/0] x", "[w/1] x"], "[w/1] x\n[w/0] x"),
        (["[w/0] x", "[w/1] y", "[w/0] z"], "[w/1] y\n[w/0] x\n[w/0] z"),
    ],
)
def test_accepts(expected, output):
    assert mismatch(expected, output) is None


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        (["a"], ""),
        (["a"], "a\nb"),
        (["a"], "aa"),
        (["a.c"], "abc"),
        (["a", "b"], "b\na"),
        (["a", "a"], "a"),
        (["[w/0] x", "[w/0] y", "[w/1] x"], "[w/0] y\n[w/1] x\n[w/0] x"),
    ],
)
def test_refuses(expected, output):
    assert mismatch(expected, output) is not None
