"""What a host does while its device may have to wait: one vocabulary for every finding.

Slow steps, slow processes and profiles have the same words for it. It is a column of the loop's
time (`DATA`, `DISPATCH`, `PYTHON`), or an explanation of one.
"""

from __future__ import annotations

from enum import StrEnum


class HostWork(StrEnum):
    """A kind of work; the value is its name in metrics and files.

    Attributes:
        phrase: the same in a message, as the subject of "took 0.2 s" or after "0.2 s in".

    >>> f"hosts/slowest_{HostWork.GC}_seconds", HostWork.GC.phrase
    ('hosts/slowest_gc_seconds', "Python's garbage collector")
    """

    phrase: str

    def __new__(cls, name: str, phrase: str) -> HostWork:
        """A member; the enumeration calls it with the pairs below."""
        member = str.__new__(cls, name)
        member._value_, member.phrase = name, phrase
        return member

    COMPILE = "compile", "compiling"
    EVALUATION = "evaluation", "evaluation"
    TRANSFER = "transfer", "the transfer of arrays to the device"
    WAIT = "wait", "the wait for the device"
    DATA = "data", "the wait for data"
    DISPATCH = "dispatch", "the call of the step"
    PYTHON = "python", "Python between the steps"
    GC = "gc", "Python's garbage collector"
    STARVED = "starved", "the wait for a processor core, which another program may use"
    STOPPED = "stopped", "stops of the process or its machine"
    COMPUTE = "compute", "work of its own"
