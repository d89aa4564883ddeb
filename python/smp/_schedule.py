"""Pipeline schedules that programs write."""

from . import _core

start_forward, start_backward = _core.start_forward, _core.start_backward


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

    def next(self):
        raise NotImplementedError(
            f"{type(self).__name__}.next, which is called after events"
        )

    def step_begins(self, step, microbatches, partitions, active):
        """First in each step: forget the last one, which may have failed. At
        most ``active`` microbatches may be between their begin and their end.
        """
        return self.next()

    def task_started(self, task):
        """After each task that this named (``task.phase``,
        ``task.microbatch``): is there another?"""
        return self.next()

    def forward_ended(self, microbatch):
        return self.next()

    def backward_ready(self, microbatch):
        """After ``forward_ended``, if the microbatch has a backward phase."""
        return self.next()

    def backward_ended(self, microbatch):
        """The microbatch is over; its activations are free."""
        return self.next()

    def memory_level(self, pp_rank, bytes):
        """What a rank allocated since the step began, if that changed when it
        began or ended work."""
        return self.next()

    def rank_activity(self, pp_rank, busy):
        return self.next()
