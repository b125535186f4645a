"""What a member is about to do, as a number that is compared and a text for the error.

Members of a collective must do the same one. Each compares a hash of what it does with the
others'; only where they differ are the texts exchanged. The place in the user's code is shown
but not compared: two branches may call one operation.
"""

import os
import re
import sys
from collections.abc import Sequence
from hashlib import blake2b
from types import FrameType
from typing import Any, Final

from mpiml.collectives.regions import first_difference, members
from mpiml.errors import MpimlError, UsageError
from mpiml.fingerprint import own_path

__all__ = ["REFUSED", "Label", "call_site", "kind_of", "mismatch", "refused"]

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IN: Final = " in bucket "
_kinds: dict[str, int] = {}  # file -> 0 mpiml's, 1 a library's, 2 the user's

REFUSED: Final = ", refused: "  #: in the head of a call that a member cannot make

_Site = tuple[str, int]


class Label:
    """One collective operation, as its members must agree on it.

    Local: no MPI.

    Parameters
    ----------
    kind : str
        The call: ``"Bucket.allreduce"``.
    op : str
        The operation, if it has one: ``"sum"``.
    name : str, optional
        What the user calls it, ``name=``. Compared.
    site : tuple of (str, int), optional
        What `call_site` returned. Shown, not compared. None: looked for when it is shown, so
        that a call that goes well does not pay for it.
    leaves : str
        `mpiml.collectives.regions.Regions.digest_text` of what is reduced.
    more : str
        Other arguments that must be equal: ``"root=0"``.
    of : int
        The number of the bucket that it is an operation of; 0: of none.
    """

    __slots__ = ("hash", "head", "leaves", "of", "op", "site")

    def __init__(
        self,
        kind: str,
        op: str = "",
        name: str | None = None,
        site: _Site | None = None,
        leaves: str = "",
        more: str = "",
        of: int = 0,
    ) -> None:
        arguments = [
            *([f"op={op!r}"] if op else []),
            *([more] if more else []),
            *([f"name={name!r}"] if name is not None else []),
        ]
        self.head = f"{kind}({', '.join(arguments)})"  #: the call as one would write it
        self.leaves = leaves
        self.op = op
        self.site = site
        self.of = of
        text = f"{self.head}\n{of}\n{leaves}".encode("utf-8", "backslashreplace")
        #: 64 bits, never 0; equal where all but `site` is
        self.hash = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1

    def text(self) -> str:
        """Return what `mismatch` needs of this member: call, place, and a line per leaf."""
        which = f"{_IN}{self.of}" if self.of else ""
        return f"{self.head}{which}\n{self.place()}\n{self.leaves}"

    def __str__(self) -> str:
        place = self.place()
        return f"{self.head} at {place}" if place else self.head

    def here(self) -> "Label":
        """Return the same label with the place of this call, for use in another thread."""
        label = Label.__new__(Label)
        label.head, label.leaves, label.hash = self.head, self.leaves, self.hash
        label.op, label.of = self.op, self.of
        label.site = call_site()
        return label

    def place(self) -> str:
        """Return file and line of the user's call: `site`, or of the call being made now."""
        site = self.site or call_site()
        if site is None:
            return ""
        path, line = site
        here = os.getcwd() + os.sep
        return f"{path.removeprefix(here)}:{line}".replace("\n", "?")


def call_site() -> _Site | None:
    """Return file and line of the innermost call from the user's code.

    Local: no MPI. Frames of mpiml are passed over, those of installed packages and the
    standard library too, unless there are no others.
    """
    frame: FrameType | None = sys._getframe(1)
    other: _Site | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        kind = _kinds.get(path)
        if kind is None:
            kind = 0 if path.startswith(_HERE) else 2 if own_path(path, None) else 1
            _kinds[path] = kind
        if kind == 2:
            return path, frame.f_lineno
        if kind == 1 and other is None:
            other = path, frame.f_lineno
        frame = frame.f_back
    return other


def refused(where: str, error: Exception) -> Label:
    """Return the label of a call that this member cannot make, and why. Local."""
    kind = "" if isinstance(error, MpimlError) else f"{type(error).__name__}: "
    return Label(" ".join(f"{where}{REFUSED}{kind}{error}".split()))


def kind_of(label: Any) -> bytes:
    """Return 8 bytes that tell the call of a label, or of what stands for one, without more.

    Local. The same for a call that is refused: its arguments do not count.
    """
    head = getattr(label, "head", None)
    words = re.split(r"[(,:]| of ", str(label) if head is None else head, maxsplit=1)
    return blake2b(words[0].encode("utf-8", "replace"), digest_size=8).digest()


def mismatch(
    texts: Sequence[str], where: str, index: int | None = None, number: int = 0
) -> UsageError:
    """Return the error for members that do not do the same.

    Local: no MPI, the same text on every member but for `index`.

    Parameters
    ----------
    texts : sequence of str
        `Label.text` of each member, in their order.
    where : str
        Opens the message: what the members are of.
    index : int, optional
        This member.
    number : int
        Which operation of each member it is, from 1; 0: is not said.

    Returns
    -------
    UsageError
        To be raised. Names the calls, their places and members; for one call with other
        arrays, the first that differs.
    """
    parts = [[*text.split("\n", 2), "", ""][:3] for text in texts]
    found = [re.fullmatch(rf"(.*)({_IN}\d+)", head) for head, _, _ in parts]
    if len({one and one[2] for one in found}) == 1:  # which bucket it is says nothing
        parts = [
            [one[1] if one else part[0], *part[1:]]
            for one, part in zip(found, parts, strict=True)
        ]
    this = "" if index is None else f" This is member {index}."
    refused = [member for member, (head, _, _) in enumerate(parts) if REFUSED in head]
    if refused:
        call, _, why = parts[refused[0]][0].removesuffix("()").partition(REFUSED)
        return UsageError(
            f"{where}: {members(refused)} could not take part in {call}"
            f"{_places(parts, refused)}: {why}{this}"
        )
    calls: dict[str, list[int]] = {}
    for member, (head, _, _) in enumerate(parts):
        calls.setdefault(head, []).append(member)
    if len(calls) > 1:
        got = "; ".join([_said(head, parts, who) for head, who in calls.items()])
        cure = (
            "Every member must make the same collective calls in the same order: look for "
            "one under a condition, or in a loop of another length."
        )
    else:
        (head,) = calls
        places = _places(parts, calls[head])
        got = f"{head}{places} with other arrays: "
        got += first_difference([leaves for _, _, leaves in parts]) or "no difference found"
        cure = "Give the same tree, shapes and dtypes on every member."
    got = f"as number {number} of each: {got}" if number else got
    return UsageError(
        f"{where}: expected the same operation on all {len(parts)} members, got {got}.{this} "
        f"{cure}"
    )


def _said(head: str, parts: Sequence[Sequence[str]], who: Sequence[int]) -> str:
    shapes = parts[who[0]][2].split("\n")
    of = f" of {len(shapes)} arrays" if len(shapes) > 1 else f" of {shapes[0]}" * any(shapes)
    return f"{head}{of}{_places(parts, who)} ({members(who)})"


def _places(parts: Sequence[Sequence[str]], who: Sequence[int]) -> str:
    places = list(dict.fromkeys([parts[member][1] for member in who if parts[member][1]]))
    return f" at {', '.join(places[:3])}{', ...' if len(places) > 3 else ''}" if places else ""
