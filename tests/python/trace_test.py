# ctest: seconds=40 label=multiprocess
"""Traces, as Perfetto reads them."""

import json
import os
import re
import subprocess
import sys
import tempfile

from trace_processor import TraceProcessor

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
BIN = os.environ.get("SMP_BIN_DIR") or os.path.join(ROOT, "build/release/bin")

# What the questions below are about.
TABLES = """
create perfetto table spans as
select s.id, s.ts, s.dur, s.ts + s.dur as till, s.name, p.pid as rank,
  extract_arg(s.arg_set_id, 'args.kind') as kind,
  extract_arg(s.arg_set_id, 'args.step') as step,
  extract_arg(s.arg_set_id, 'args.request') as request
from slice s
join thread_track t on t.id = s.track_id
join thread using (utid)
join process p using (upid);

-- In which execution each is; an execution is in itself.
create perfetto table within as
select s.id, coalesce(
    iif(s.kind = 'execution', s.id, null),
    (select a.id from ancestor_slice(s.id) a join spans x on x.id = a.id
     where x.kind = 'execution')) as execution
from spans s;

-- Requests of other ranks.
create perfetto table served as
select *, cast(substr(request, 1, instr(request, ':') - 1) as int) as caller
from spans
where kind = 'execution'
  and caller != rank;

create perfetto table arrows as
select f.id, extract_arg(f.arg_set_id, 'name') as name,
  o.rank as from_rank, w.execution as from_execution,
  i.id as to_id, i.rank as to_rank, i.request as to_request,
  iif(o.ts < i.ts, o.till, o.ts) as leaves, i.ts as comes
from flow f
left join spans o on o.id = f.slice_out
left join within w on w.id = f.slice_out
left join spans i on i.id = f.slice_in;
"""

# Each finds what must not be.
RULES = {
    "Perfetto takes all of the file": """
select name, value from stats
where severity in ('error', 'data_loss') and value > 0""",
    "what happens has a step, or is between two": """
select distinct x.name, x.step from spans x
where x.step not in (select step from spans where kind = 'step')
  and x.step != 0""",
    "a request executes once": """
select request, count(*) as times from served
group by request having times != 1""",
    "an arrow leads from each request to its execution": """
select s.request, count(a.id) as arrows
from served s
left join arrows a on a.name = 'request' and a.to_id = s.id
  and a.from_rank = s.caller and a.from_execution is not null
group by s.id having arrows != 1""",
    "an arrow leads from each execution back": """
select s.request, count(a.id) as arrows
from served s
left join arrows a on a.name = 'reply' and a.from_execution = s.id
  and a.to_rank = s.caller and a.to_request = s.request
group by s.id having arrows != 1""",
    "no other arrow is there": """
select a.* from arrows a
where not (a.name = 'request' and a.to_id in (select id from served))
  and not (a.name = 'reply' and a.from_execution in (select id from served))""",
    "an arrow is not drawn back in time": """
select name, from_rank, to_rank, leaves, comes from arrows
where leaves > comes""",
    "a rank executes one thing at a time": """
select rank, name, ts, last from (
  select *, max(till) over (partition by rank order by ts
    rows between unbounded preceding and 1 preceding) as last
  from spans where kind = 'executing')
where ts < last""",
    "a rank executes within steps": """
select x.rank, x.name, x.ts from spans x
where x.kind in ('executing', 'execution') and not exists (
  select 1 from spans s where s.kind = 'step' and s.rank = x.rank
    and s.step = x.step and s.ts <= x.ts and x.till <= s.till)""",
    "modules and waits are within executions": """
select rank, kind, name, ts from spans join within using (id)
where kind in ('module', 'wait') and execution is null""",
    "waits say for what": """
select name from spans
where kind = 'wait' and name not glob 'waits for ?*'""",
}

# What every rank must have.
WANTED = {
    "executions": "kind = 'execution'",
    "modules": "kind = 'module'",
    "optimizers": "name = 'optimizer'",
}

BUBBLES = """
select s.step, 1 - 1.0 * sum(busy) / sum(s.dur) as bubble
from spans s
join (select rank, step, sum(dur) as busy from spans
      where kind = 'executing' group by rank, step) using (rank, step)
where s.kind = 'step'
group by s.step"""


def train(run_dir, ranks, *settings):
    """Four small steps, with a trace of the second and the third."""
    done = subprocess.run(
        [
            os.path.join(BIN, "smp-train"),
            os.path.join(ROOT, "config", "quickstart.toml"),
            *("--run-dir", run_dir, "--ranks", str(ranks), *settings),
            *("--monitor.trace=2-3", "--train.steps=4"),
            *("--model.width=64", "--data.sequence_length=32"),
            *("--train.eval_steps=0", "--train.sample=0"),
            "--train.save_model=false",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=150,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"the run on {ranks} ranks ended with {done.returncode}")


def metrics_of(run_dir):
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        lines = [json.loads(x) for x in file]
    return {x["step"]: x for x in lines if "step" in x}


def check_rules(trace, ranks):
    for rule, sql in RULES.items():
        found = trace.query(sql)
        assert not found, f"{rule}: {len(found)} times not, as {found[:3]}"
    for what, which in WANTED.items():
        found = trace.query(f"select distinct rank from spans where {which}")
        found = {x["rank"] for x in found}
        assert found == set(range(ranks)), f"{what} are on {found}"


def check_all_is_there(trace, path):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    wanted = sum(x["ph"] in "Xb" for x in events)
    [found] = trace.query("select count(*) as n from slice where dur >= 0")
    assert found["n"] == wanted > 0, (found, wanted)


def check_ranks_and_steps(trace, ranks, steps):
    found = trace.query("select pid, name from process where name is not null")
    names = {x["pid"]: x["name"] for x in found}
    assert len(names) == len(found) == ranks, found
    for rank in range(ranks):
        assert re.fullmatch(rf"rank {rank} \(.+\)", names[rank]), names
    found = trace.query(
        "select rank, step, name from spans where kind = 'step'"
        " order by rank, ts"
    )
    found = [(x["rank"], x["step"], x["name"]) for x in found]
    wanted = [(r, s, f"step {s}") for r in range(ranks) for s in steps]
    assert found == wanted, (found, wanted)


def same_bubbles(trace, metrics, steps):
    """A rank may lose its core between its clock for the one and for the other,
    which is much of so small a step."""
    found = {x["step"]: x["bubble"] for x in trace.query(BUBBLES)}
    wanted = {x: metrics[x]["bubble_ratio"] for x in steps}
    assert found.keys() == wanted.keys(), (found, wanted)
    same = all(abs(found[x] - wanted[x]) < 0.01 for x in steps)
    if not same:
        print(f"bubbles {found}, not {wanted}", flush=True)
    return same


def check_traffic(trace, ranks, categories):
    """On tracks of the rank: one that is of no process mixes all of them."""
    found = trace.query(
        "select distinct category, p.pid as rank from slice s"
        " left join process_track t on t.id = s.track_id"
        " left join process p using (upid)"
        " where category in ('transfer', 'collective')"
    )
    found = {(x["category"], x["rank"]) for x in found}
    wanted = {(x, rank) for x in categories for rank in range(ranks)}
    assert found == wanted, (found, wanted)


def check(ranks, categories, *settings):
    if not any(check_once(ranks, categories, *settings) for _ in range(4)):
        sys.exit(f"{ranks} ranks: no trace has the bubbles of its run")
    print(f"ok {ranks} ranks", flush=True)


def check_once(ranks, categories, *settings):
    steps = [2, 3]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = os.path.join(folder, "run")
        train(run_dir, ranks, *settings)
        path = os.path.join(run_dir, "trace.json")
        with TraceProcessor(path) as trace:
            trace.query(TABLES)
            check_all_is_there(trace, path)
            check_ranks_and_steps(trace, ranks, steps)
            check_rules(trace, ranks)
            check_traffic(trace, ranks, categories)
            return same_bubbles(trace, metrics_of(run_dir), steps)


def main():
    check(2, {"transfer"})
    check(4, {"transfer", "collective"}, "--smp.ddp=true")


if __name__ == "__main__":
    main()
