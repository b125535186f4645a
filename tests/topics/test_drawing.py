"""Topics in a printed program, in its flowchart, and in what all ranks compare."""

import pytest

import mpiml
from mpiml.digest import describe, first_difference


def work(*ends):
    pass


def before(index, replicas):
    return (index - 1) % replicas


def build(policy="latest", deliver="all", source=before, encode=None, publishes=True):
    program = mpiml.Program("ring")
    topic = program.topic("sums", policy, deliver, encode)
    end = topic.publisher() if publishes else topic.subscriber()
    node = mpiml.PyNode(work, end, topic.subscriber(source))
    program.add_node(node, label="member", replicas=3)
    return program


def test_a_printed_program_shows_topics_and_their_ends():
    assert str(build(mpiml.Keep(4), "round_robin", encode=str)).splitlines()[1:] == [
        "  member x 3  PyNode(work)",
        "    member -> topic 'sums'",
        "    member <- topic 'sums' of before",
        "  topic 'sums'  Keep(4, on_full='block'), round_robin, encode",
    ]
    assert "member <- topic 'sums' of 'member'" in str(build(source="member"))
    assert str(build(source=None)).splitlines()[3] == "    member <- topic 'sums'"


def test_a_flowchart_shows_topics_and_their_ends():
    assert build().to_mermaid().splitlines() == [
        "flowchart LR",
        '    r0["member x 3<br/>PyNode(work)"]',
        '    t0(["sums<br/>latest"])',
        "    r0 --> t0",
        '    t0 -->|"of before"| r0',
    ]
    assert "    t0 --> r0" in build(source=None).to_mermaid().splitlines()


def test_two_ends_alike_are_shown_once():
    program = build(source=None, publishes=False)
    assert str(program).count("<- topic 'sums'") == 1
    assert program.to_mermaid().count("t0 --> r0") == 1


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            {"policy": mpiml.Keep(4)},
            "\"topic 0\" is 'sums', Keep(4, on_full='block'), deliver 'all', encode None, decode "
            "None on rank 1, and 'sums', 'latest', ",
        ),
        ({"deliver": "round_robin"}, "deliver 'round_robin'"),
        ({"encode": str}, "encode class builtins.str"),
        (
            {"source": 1},
            "\"argument 1 of member\" is topic 'sums': subscriber, source 1, end 1 on rank 1",
        ),
        (
            {"source": lambda index, replicas: (index - 1) % replicas},
            "\"argument 1 of member\" is topic 'sums': subscriber, source function",
        ),
        (
            {"publishes": False},
            "\"argument 0 of member\" is topic 'sums': subscriber, source None",
        ),
    ],
)
def test_a_difference_between_ranks_is_found(odd, text):
    usual = describe(build())
    assert first_difference([usual, usual, describe(build())]) == ""
    assert text in first_difference([usual, describe(build(**odd)), usual])
