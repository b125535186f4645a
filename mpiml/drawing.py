"""A program as text: the tree that ``print(program)`` shows, and a Mermaid flowchart."""

from typing import Protocol

from mpiml.graph import Role, Unit
from mpiml.handles import Handle, Reference
from mpiml.topics.graph import ALL, End, Topic, ends_of_role

__all__ = ["mermaid", "tree"]


class _Program(Protocol):
    """The part of `Program` that is drawn."""

    name: str
    roles: list[Role]

    @property
    def units(self) -> list[Unit]: ...

    @property
    def topics(self) -> list[Topic]: ...

    def references(self, role_index: int) -> list[tuple[str, Reference]]: ...


def tree(program: _Program) -> str:
    """Return a readable tree: labels, replicas, callables, settings, edges."""
    lines = [f"Program {program.name!r}"]
    for unit in program.units:
        pad = "  "
        if len(unit.roles) > 1 or program.roles[unit.roles[0]].label != unit.label:
            lines.append(f"{pad}{_times(unit.label, unit.replicas)}  Colocation{_place(unit)}")
            pad += "  "
        for index in unit.roles:
            role = program.roles[index]
            place = _place(unit) if role.label == unit.label else ""
            lines.append(f"{pad}{_times(role.label, role.replicas)}  {_what(role)}{place}")
            lines.extend(f"{pad}  {role.label} -> {name}" for name in _targets(program, index))
            ends = [f"{_arrow(end)} {end.topic!r}{_source(end)}" for end in ends_of_role(role)]
            lines.extend(f"{pad}  {role.label} {end}" for end in dict.fromkeys(ends))
    lines.extend(f"  {topic!r}  {_way(topic)}" for topic in program.topics)
    return "\n".join(lines)


def mermaid(program: _Program) -> str:
    """Return a Mermaid flowchart: a box for each role, a frame for each `Colocation`."""
    lines = ["flowchart LR"]
    for position, unit in enumerate(program.units):
        framed = program.roles[unit.roles[0]].label != unit.label
        if framed:
            title = _escape(_times(unit.label, unit.replicas))
            lines.append(f'    subgraph u{position}["{title}"]')
        for index in unit.roles:
            role = program.roles[index]
            text = f"{_escape(_times(role.label, role.replicas))}<br/>{_escape(_what(role))}"
            lines.append(f'    {"    " if framed else ""}r{index}["{text}"]')
        if framed:
            lines.append("    end")
    for index in range(len(program.roles)):
        found: dict[int, list[str]] = {}
        for _, handle in program.references(index):
            found.setdefault(handle.role_index, []).append(_target(program, handle))
        for target, names in found.items():
            part = "" if program.roles[target].label in names else "|some|"
            lines.append(f"    r{index} -->{part} r{target}")
    for topic in program.topics:
        text = f"{_escape(topic.name)}<br/>{_escape(_way(topic))}"
        lines.append(f'    t{topic.number}(["{text}"])')
    for index, role in enumerate(program.roles):
        edges = [_edge(index, end) for end in ends_of_role(role)]
        lines.extend(dict.fromkeys(edges))
    return "\n".join(lines)


def _edge(role_index: int, end: End) -> str:
    if end.publishes:
        return f"    r{role_index} --> t{end.topic.number}"
    part = f'|"{_escape(_source(end).strip())}"|' if end.source is not None else ""
    return f"    t{end.topic.number} -->{part} r{role_index}"


def _arrow(end: End) -> str:
    return "->" if end.publishes else "<-"


def _source(end: End) -> str:
    """Return whom a subscriber hears, where it is not everybody."""
    if end.source is None:
        return ""
    if callable(end.source):
        return f" of {getattr(end.source, '__name__', 'function')}"
    return f" of {end.source!r}"


def _way(topic: Topic) -> str:
    """Return the policy of a topic, and what else is not the usual."""
    codec = [what for what in ("encode", "decode") if getattr(topic, what) is not None]
    extra = [] if topic.deliver == ALL else [topic.deliver]
    return ", ".join([str(topic.policy), *extra, *codec])


def _targets(program: _Program, role_index: int) -> list[str]:
    """Return where the edges of a role lead, each once."""
    names = [_target(program, handle) for _, handle in program.references(role_index)]
    return list(dict.fromkeys(names))


def _target(program: _Program, handle: Reference) -> str:
    number = program.roles[handle.role_index].replicas
    if not isinstance(handle, Handle):
        return handle.text(number)
    alone = number == 1
    return handle.role if alone else f"{handle.role}[{handle.index}]"


def _times(label: str, replicas: int) -> str:
    return label if replicas == 1 else f"{label} x {replicas!r}"


def _what(role: Role) -> str:
    """Return the callables of a role and the settings that are not the usual ones."""
    nodes = dict.fromkeys(repr(member.node) for member in role.members)
    settings = role.members[0].settings
    extra = [f"concurrency={settings.concurrency}"] if settings.concurrency != 1 else []
    extra += ["daemon"] if settings.daemon else []
    extra += [f"allow={', '.join(settings.allow)}"] if settings.allow is not None else []
    return ", ".join(nodes) + "".join(f"  {text}" for text in extra)


def _place(unit: Unit) -> str:
    text = repr(unit.placement)
    return "" if text == "Placement()" else f"  {text}"


def _escape(text: str) -> str:
    return (
        text.replace("&", "#amp;")
        .replace('"', "#quot;")
        .replace("<", "#lt;")
        .replace(">", "#gt;")
    )
