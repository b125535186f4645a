from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpiml.datasets import blocks, read_libsvm
from mpiml.datasets.text import Malformed, Style, parse
from mpiml.errors import UsageError

STYLE = Style(1, 9, np.dtype(np.float32), False)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"one 1:1", "'one': expected a label, one finite number, as the first column"),
        (b"1,2 1:1", "'1,2': expected a label"),
        (b"nan 1:1", "'nan': expected a label"),
        (b"1e99 1:1", "'1e99': expected a label"),  # no float32
        (b"1:1 2:1", "'1:1': expected a label"),
        (b"1:2 3", "'1:2': expected a label"),
        (b"1 1::2", "'1::2': expected index:value"),
        (b"1 2", "'2': expected index:value, the index an integer"),
        (b"1 1:2:3", "'1:2:3': expected index:value"),
        (b"1 1.5:2", "'1.5:2': expected index:value, the index an integer"),
        (b"1 x:2", "'x:2': expected index:value, the index an integer"),
        (b"1 inf:2", "'inf:2': expected index:value, the index an integer"),
        (b"1 :2", "':2': expected index:value, the index an integer"),
        (b"1 1:", "'1:': expected index:value, the value a number"),
        (b"1 1: 2", "'1:': expected index:value, the value a number"),
        (b"1 1 :2", "'1': expected index:value, the index an integer"),
        (b"1 1:2x 2:1", "'1:2x': expected index:value, the value a number"),
        (b"1 1:1_0", "'1:1_0': expected index:value, the value a number"),
        (b"1 1:1.2.3", "'1:1.2.3': expected index:value, the value a number"),
        (b"1 1:1-2 2:x", "'1:1-2': expected index:value, the value a number"),
        (b"1 1:\x001", r"'1:\\x001': expected index:value, the value a number"),
        (b"1 1:\xe9", r"'1:\\\\xe9': expected index:value, the value a number"),
        (b"1 2:1 2:1", "'2:1': expected an index above the one before, 2. Sort each row"),
        (b"1 3:1 2:1", "'2:1': expected an index above the one before, 3"),
        (b"1 -1:1", "'-1:1': expected an index of 1 or more. Correct the file"),
        (b"1 0:1", "'0:1': expected an index of 1 or more. Pass zero_based=True"),
        (b"1 10:1", "'10:1': expected an index of at most 9, as features=9"),
        (b"1 1e30:1", "'1e30:1': expected an index of at most 9"),
        (b"1 1:nan", "'1:nan': expected a finite float32. Pass allow_nan=True"),
        (b"1 1:-inf", "'1:-inf': expected a finite float32"),
        (b"1 1:1e39", "'1:1e39': expected a finite float32"),
        (b"1 qid:x 1:1", "'qid:x': expected qid: and an integer"),
        (b"1 1:1 qid:2", "'qid:2': expected index:value, the index an integer"),
        (b"1 qid:1 qid:2", "'qid:2': expected index:value, the index an integer"),
        (b"qid:1 1:1", "'qid:1': expected a label"),
        (b"1 " + b"x" * 90, r"'x{37}\.\.\.': expected index:value"),
    ],
)
def test_a_line_that_is_wrong_is_named(line, match):
    with pytest.raises(Malformed, match=match) as caught:
        parse(b"1 1:1\n\n# comment\n1 1:1 # x\n" + line + b"\n1 1:1\noops\n", STYLE)
    assert caught.value.line == 4
    with pytest.raises(Malformed, match=match):
        parse(line, STYLE)


def test_the_largest_index_of_int32():
    style = STYLE._replace(features=None)
    assert parse(b"1 2147483647:1", style).indices.tolist() == [2**31 - 2]
    with pytest.raises(Malformed, match="at most 2147483647, as an int32 holds it"):
        parse(b"1 2147483648:1", style)


def test_a_numpy_that_stops_without_an_error_is_noticed():
    """An older one only warns, and returns the numbers before."""
    with mock.patch("numpy.fromstring", return_value=np.array([1.0, 1, 2, 3])):
        with pytest.raises(Malformed, match="from here on"):
            parse(b"1 1:2", STYLE)


def test_allow_nan(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"1 1:nan 2:-inf 3:INF 4:1e39\n")
    values = read_libsvm(path, allow_nan=True).values
    np.testing.assert_array_equal(values, np.array([np.nan, -np.inf, np.inf, np.inf], "f4"))


@pytest.mark.parametrize("block", [7, 100, 1 << 22])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("balance", ["bytes", "rows"])
def test_file_and_line_are_named_whoever_reads_it(tmp_path, block, size, balance):
    path = tmp_path / "data.svm"
    path.write_bytes(b"# head\n" + b"1 1:1\n" * 30 + b"\n1 1:x\n" + b"1 1:1\n" * 30)
    told = []
    with mock.patch.object(blocks, "BLOCK", block):
        for rank in range(size):
            try:
                read_libsvm(path, rank, size, balance=balance)
            except UsageError as error:
                told.append(str(error))
    assert told == [
        f"read_libsvm: {path}, line 33: '1:x': expected index:value, the value a number."
    ]


pieces = [
    "1",
    "2",
    " ",
    " ",
    "\n",
    ":",
    "1:1",
    " 2:2",
    " 3:.5e1",
    " qid:3",
    "-",
    "#",
    "\r",
    ".",
]
tokens = st.lists(
    st.sampled_from(pieces) | st.text("0123:. -+enaiqd#x\n\0", max_size=3), max_size=20
).map(lambda some: "".join(some).encode())


@given(tokens)
@example(b"1 1:1 2:2")
@example(b"1 1-2 x")
def test_any_text_is_read_or_refused_as_one_line_at_a_time_would(text):
    """Whatever the block's masks let through is what a plain loop over its tokens reads."""
    why, part = "", None
    try:
        part = parse(text, STYLE)
    except Malformed as error:
        why = str(error)
    if part is None:
        assert "from here on" not in why  # there was a reason
        return
    lines = [line.partition(b"#")[0].split() for line in text.split(b"\n")]
    rows = [[t for t in r if not t.startswith(b"qid:")] for r in lines if r]
    assert part.labels.tolist() == [np.float32(float(r[0])) for r in rows]
    assert part.counts.tolist() == [len(r) - 1 for r in rows]
    pairs = [t.split(b":") for r in rows for t in r[1:]]
    assert part.indices.tolist() == [float(i) - 1 for i, _ in pairs]
    assert part.values.tolist() == [np.float32(float(v)) for _, v in pairs]
