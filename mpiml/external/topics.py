"""Messages on topics that ranks of other programs hear: one array each."""

from typing import Any

from mpiml.external.encoding import as_array, encode
from mpiml.payload import Given, Packed

__all__ = ["packed_array"]


def packed_array(value: Any, topic: Any, where: str) -> Packed:
    """Encode a message, for all who get it.

    Parameters
    ----------
    value : array or number
        The message.
    topic : Topic
        Says what its arrays are, if somebody has said so.
    where : str
        Begins the text of an error.

    Raises
    ------
    UsageError
        It is no array, or not what the topic's arrays are.
    """
    given = type(value) is Given
    array = as_array(value.value if given else value, where)
    if topic.array is not None:
        topic.array.check(array, where)
    return Packed(*encode(array, where, copy=not given))
