"""Servers that follow: whatever comes first, they do what the first one has decided, in order."""

from hypothesis import given
from hypothesis import strategies as st

from mpiml.roles.parameter_server.following import Apply, Drop, Following, Mark


def apply(*keys):
    return Apply(keys, tuple(0 for _ in keys), tuple(0 for _ in keys))


def test_a_decision_waits_for_its_gradients():
    following = Following()
    assert following.follow([apply("a", "b"), Mark("t"), apply("c")]) == []
    assert following.arrive("b", "B") == []
    assert following.arrive("c", "C") == []
    (first,) = following.arrive("a", "A")
    assert first.found == ("A", "B")
    mark, last = following.arrive("t", "T")  # until it has come, nothing goes on
    assert (mark.entry, mark.found, last.found) == (Mark("t"), ("T",), ("C",))
    assert len(following) == 0


def test_a_dropped_gradient_is_forgotten_whichever_comes_first():
    following = Following()
    assert following.arrive("a", "A") == []
    assert following.follow([Drop("a"), Drop("b")]) == []
    assert following.arrive("b", "B") == []
    assert len(following) == 0


@given(st.data())
def test_any_interleaving_gives_the_order_of_the_first(data):
    """Two streams, each in its own order: gradients of each worker, and decisions."""
    kinds = data.draw(st.lists(st.sampled_from(["apply", "pair", "drop", "mark"]), max_size=12))
    entries, gradients, n = [], [], 0
    for kind in kinds:
        keys = [(n + i) for i in range(2 if kind == "pair" else 1)]
        n += len(keys)
        gradients += keys
        one = Drop if kind == "drop" else Mark
        entries.append(one(keys[0]) if kind in ("drop", "mark") else apply(*keys))
    gradients = data.draw(st.permutations(gradients))
    events = [("g", g) for g in gradients] + [("e", None)] * len(entries)
    events = data.draw(st.permutations(events))
    following, following_entries, done = Following(), iter(entries), []
    for kind, key in events:
        if kind == "g":
            done += following.arrive(key, -key)
        else:
            done += following.follow([next(following_entries)])
    assert [step.entry for step in done] == [e for e in entries if not isinstance(e, Drop)]
    for step in done:
        keys = step.entry.keys if isinstance(step.entry, Apply) else (step.entry.key,)
        assert step.found == tuple(-key for key in keys)
    assert len(following) == 0
