# ctest: seconds=15 label=multiprocess
"""Schedules that are Python classes."""

import smp
from harness import (
    HALVES,
    Net,
    case,
    compare,
    expect,
    loss_of,
    make_step,
    own_part,
    ranks,
    run,
    samples,
    start_model,
)


class OneByOne(smp.Schedule):
    """1F1B, unless the class is told to make a mistake."""

    mistake = None
    told = []  # of the last step, on pp_rank 0

    def step_begins(self, step, microbatches, partitions, active):
        self.microbatches, self.active = microbatches, active
        self.begun = self.alive = 0
        self.ready = []
        # The instance of a simulation before the first step has step 0.
        self.log = OneByOne.told if step else []
        self.log.clear()
        assert partitions == 2, partitions
        return self.next()

    def task_started(self, task):
        self.log.append((task.phase, task.microbatch))
        return self.next()

    def backward_ready(self, microbatch):
        self.ready.append(microbatch)
        return self.next()

    def backward_ended(self, microbatch):
        self.alive -= 1
        return self.next()

    def next(self):
        mistake = self.log is OneByOne.told and OneByOne.mistake
        if mistake and self.begun == 1:
            return mistake()
        if self.ready:
            return smp.start_backward(self.ready.pop(0))
        if self.begun == self.microbatches or self.alive == self.active:
            return None
        self.alive += 1
        self.begun += 1
        return smp.start_forward(self.begun - 1)


@case
def a_class_schedules_the_steps():
    compare(Net(), samples, loss_of, pins=HALVES)
    if smp.pp_rank() != 0:
        return
    for phase in "forward", "backward":
        found = [m for p, m in OneByOne.told if p == phase]
        assert found == [0, 1, 2, 3], OneByOne.told
    assert OneByOne.told[:2] == [("forward", 0), ("forward", 1)]


@case
def answers_are_checked():
    model = start_model(Net())
    train_step = make_step(model)
    batch = own_part(samples(0))
    expected = train_step(batch).reduce_mean()

    def raises():
        raise LookupError("in the schedule")

    for mistake, text in (
        (raises, "LookupError: in the schedule"),
        (lambda: 7, "task_started returned 7: return smp.start_forward"),
        (lambda: smp.start_forward(0), '[0, "forward"] a second time'),
        (lambda: smp.start_backward(0), '[0, "backward"], which is not ready'),
        (lambda: smp.start_forward(9), '[9, "forward"]'),
    ):
        OneByOne.mistake = mistake
        e = expect(smp.Error, text, lambda: train_step(batch))
        assert e.code == "schedule" and "OneByOne" in str(e), (e.code, e)
    OneByOne.mistake = None
    assert (train_step(batch).reduce_mean() - expected).abs() < 1e-6


if __name__ == "__main__":
    run(
        ranks(2),
        ranks(2, "a_class_schedules_the_steps", static_mode=True),
        pipeline=OneByOne,
    )
