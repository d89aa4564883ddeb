"""Pipeline schedules that programs write."""

from typing import Any

from . import _core


def start_forward(microbatch: int) -> Any:
    """An answer of a ``Schedule``: this microbatch starts its forward phase."""
    return _core.start_forward(microbatch)


def start_backward(microbatch: int) -> Any:
    """An answer of a ``Schedule``: this microbatch starts its backward phase."""
    return _core.start_backward(microbatch)


class Schedule:
    """Decides which microbatch starts its forward or its backward phase next:
    ``smp.init(pipeline=MySchedule)`` with a class derived from this one.

    One instance, made without arguments, lives on pp_rank 0 as an actor on a
    thread of its own; another one takes part in a simulation before the first
    step. It is told one event at a time, by the methods below, and each returns
    ``smp.start_forward(microbatch)``, ``smp.start_backward(microbatch)``, or
    None to wait for the next event. Those that a class does not have call
    ``next()``. Answers are checked: see docs/schedules.md.
    """

    def next(self) -> Any:
        """What to start now, after any event that has no method of its own."""
        raise NotImplementedError(
            f"{type(self).__name__}.next, which is called after events"
        )

    def step_begins(
        self, step: int, microbatches: int, partitions: int, active: int
    ) -> Any:
        """First in each step: forget the last one, which may have failed. At
        most ``active`` microbatches may be between their begin and their end.
        """
        return self.next()

    def task_started(self, task: Any) -> Any:
        """After each task that this named (``task.phase``,
        ``task.microbatch``): is there another?"""
        return self.next()

    def forward_ended(self, microbatch: int) -> Any:
        """The forward phase of the microbatch is over."""
        return self.next()

    def backward_ready(self, microbatch: int) -> Any:
        """After ``forward_ended``, if the microbatch has a backward phase."""
        return self.next()

    def backward_ended(self, microbatch: int) -> Any:
        """The microbatch is over; its activations are free."""
        return self.next()

    def memory_level(self, pp_rank: int, bytes: int) -> Any:
        """What a rank allocated since the step began, if that changed when it
        began or ended work."""
        return self.next()

    def rank_activity(self, pp_rank: int, busy: bool) -> Any:
        """A rank began or ended work."""
        return self.next()
