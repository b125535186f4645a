"""Reports as bytes, how often they are sent, and the line they make. The clock is passed in."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import MpimlError, UsageError
from mpiml.progress import Progress, Report, Throttle, pack_report, unpack_report

FLOATS = st.floats(allow_nan=False)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


# -- bytes -----------------------------------------------------------------------------------


@given(
    FLOATS, FLOATS, st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), FLOATS)
)
def test_round_trip(done, total, metrics):
    assert unpack_report(pack_report(done, total, metrics)) == Report(done, total, metrics)


def test_layout_is_fixed():
    assert pack_report(1.0, None, {"é": 2.0}) == bytes.fromhex(
        "01 000000000000f03f 0000000000000000 0100 0200 c3a9 0000000000000040"
    )


def test_what_is_no_number_is_refused_by_name():
    with pytest.raises(UsageError, match=r"loss: expected a number, got \[1, 2\]"):
        pack_report(1, 2, {"loss": [1, 2]})
    with pytest.raises(UsageError, match="done: expected a number, got None"):
        pack_report(None)
    with pytest.raises(UsageError, match="at most 65535 bytes"):
        pack_report(1, 2, {"x" * 70000: 1.0})
    with pytest.raises(UsageError, match="at most 65535 metrics, got 70000"):
        pack_report(1, 2, {str(i): 1.0 for i in range(70000)})


def test_other_versions_are_refused():
    data = pack_report(1, 2, {"loss": 1.0})
    with pytest.raises(MpimlError, match="expected version 1, got 9"):
        unpack_report(b"\x09" + data[1:])


@pytest.mark.parametrize("cut", range(len(pack_report(1, 2, {"loss": 1.0}))))
def test_torn_reports_are_refused(cut):
    data = pack_report(1, 2, {"loss": 1.0})
    with pytest.raises(MpimlError):
        unpack_report(data[:cut])


def test_bytes_too_many_or_no_text_are_refused():
    data = pack_report(1, 2, {"loss": 1.0})
    with pytest.raises(MpimlError, match="expected 33 bytes, got 34"):
        unpack_report(data + b"x")
    with pytest.raises(MpimlError):
        unpack_report(data.replace(b"loss", b"\xff\xff\xff\xff"))


# -- how often -------------------------------------------------------------------------------


def test_first_report_is_sent_and_then_one_per_interval():
    throttle = Throttle(interval=0.25)
    sent = [step for step in range(9) if throttle.offer(step / 8, Report(step, 100, {}))]
    assert sent == [0, 2, 4, 6, 8]


def test_the_one_that_completes_is_sent_at_once_but_only_once():
    throttle = Throttle(interval=10)
    assert throttle.offer(0, Report(1, 3, {}))
    assert not throttle.offer(0, Report(2, 3, {}))
    assert throttle.offer(0, Report(3, 3, {}))
    assert throttle.held() is None
    assert not throttle.offer(0, Report(3, 3, {}))


def test_what_was_held_back_last_can_be_had_at_the_end():
    throttle = Throttle(interval=10)
    assert throttle.held() is None
    throttle.offer(0, Report(1, 0, {}))
    assert throttle.held() is None
    throttle.offer(1, Report(2, 0, {}))
    throttle.offer(2, Report(3, 0, {}))
    assert throttle.held() == Report(3, 0, {})
    assert throttle.held() is None
    throttle.offer(3, Report(4, 0, {}))
    assert throttle.offer(11, Report(5, 0, {}))
    assert throttle.held() is None


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5))), st.integers(0, 3))
def test_the_last_report_always_arrives(steps, total):
    throttle, now, arrived, last = Throttle(0.5), 0.0, [], None
    for pause, done in steps:
        now += pause
        last = Report(done, total, {})
        if throttle.offer(now, last):
            arrived.append(last)
    held = throttle.held()
    if held is not None:
        arrived.append(held)
    assert not steps or arrived[-1] == last


# -- the line --------------------------------------------------------------------------------


def test_roles_are_summed_and_metrics_averaged(clock):
    stream = io.StringIO()
    progress = Progress(stream, clock)
    progress.update("worker/0", 500, 2000, {"loss": 0.25})
    clock.now += 1
    progress.update("worker/1", 700, 2000, {"loss": 0.5})
    progress.update("evaluator/0", 3, 0, {})
    progress.update("worker/0", 1000, 2000, {"loss": 0.3})
    clock.now += 1
    progress.close()
    first, last = stream.getvalue().splitlines()
    assert first == "worker 500/2000 25%  loss=0.25"
    assert last == "worker 1700/4000 42%  loss=0.4  updates/s=600  |  evaluator 3"


def test_a_line_every_two_seconds_and_every_five_in_long_runs(clock):
    stream = io.StringIO()
    progress = Progress(stream, clock)
    shown = []
    for tenth in range(800):
        clock.now = 100 + tenth / 10
        before = stream.tell()
        progress.update("w/0", tenth, 0, {})
        if stream.tell() > before:
            shown.append(tenth / 10)
    assert shown == [*(float(s) for s in range(0, 60, 2)), 63.0, 68.0, 73.0, 78.0]


def test_on_a_terminal_the_line_is_replaced(clock):
    stream = Terminal()
    progress = Progress(stream, clock)
    for done in (1, 2, 3):
        progress.update("w/0", done, 4, {})
        clock.now += 0.2
    progress.close()
    progress.close()
    progress.update("w/0", 4, 4, {})
    parts = stream.getvalue().split("\r")
    assert [part.partition("%")[0] for part in parts] == [
        "",
        "w 1/4 25",
        "w 3/4 75",
        "w 3/4 75",
    ]
    assert all(part.endswith("\x1b[K") for part in parts[1:-1])
    assert stream.getvalue().endswith("\x1b[K\n")


def test_on_a_terminal_the_line_is_not_wrapped(clock):
    stream = Terminal()
    progress = Progress(stream, clock)
    progress.update("w/0", 1, 4, {f"metric{i}": 1.0 for i in range(40)})
    assert len(stream.getvalue()) == len("\r\x1b[K") + 79


def test_nothing_is_said_of_nothing(clock):
    stream = io.StringIO()
    Progress(stream, clock).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0.5, 2, "w 0.5/2 25%"),
        (999, 1000, "w 999/1000 99%"),
        (1e16, 0, "w 10000000000000000"),
        (math.inf, 3, "w inf/3"),
        (math.nan, math.nan, "w nan"),
    ],
)
def test_numbers_as_they_come(clock, done, total, text):
    stream = io.StringIO()
    Progress(stream, clock).update("w/0", done, total, {})
    assert stream.getvalue() == text + "\n"


def test_a_total_that_one_node_does_not_know_is_not_shown(clock):
    stream = io.StringIO()
    progress = Progress(stream, clock)
    progress.update("w/0", 1, 4, {})
    progress.update("w/1", 1, 0, {"loss": math.nan})
    progress.close()
    assert stream.getvalue().splitlines()[-1] == "w 2  loss=nan"


def test_the_rate_is_that_of_the_last_lines(clock):
    stream = io.StringIO()
    progress = Progress(stream, clock)
    done = 0
    for step in range(40):
        done += 2 if step < 20 else 20  # it gets faster
        progress.update("w/0", done, 0, {})
        clock.now += 2
    assert stream.getvalue().splitlines()[-1].endswith("updates/s=10")


def test_a_closed_stream_ends_the_talk_and_not_the_program(clock):
    stream = io.StringIO()
    progress = Progress(stream, clock)
    stream.close()
    progress.update("w/0", 1, 2, {})
    progress.close()


def test_standard_error_is_the_default(capsys):
    progress = Progress()
    progress.update("w/0", 1, 2, {})
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("w 1/2 50%\n")
