"""Priority with preemption of whole gangs: which have to give way, and no more than needed.

A job that does not fit may take the GPUs of running jobs of lower priority. Victims are gathered from the least
important and youngest on, until it fits; then each one that turns out not to be needed is let go. A gang is taken whole
or not at all: half a gang computes nothing. Victims wait again and go on from their last checkpoint. Tries things out
on the view's own map of free GPUs and leaves it as it was.
"""

from cairn.cluster.simulate.jobs import Action, Preempt, Running, SimulatedJob, StartJob
from cairn.cluster.simulate.view import ClusterView


def decide_priority(view: ClusterView) -> Action | None:
    if not view.waiting:
        return None
    head = view.waiting[0]
    pieces = view.fits(head)
    if pieces is not None:
        return StartJob(head, pieces, head.gpus)
    ids = victims(view, head)
    if ids:
        return Preempt(ids, why=f"job {head.id} of priority {head.priority} takes their GPUs")
    return None


def victims(view: ClusterView, job: SimulatedJob) -> tuple[int, ...]:
    """Jobs to preempt so that the job can start; empty if preempting all of them does not suffice."""
    lower = [run for run in view.running.values() if run.job.priority < job.priority]
    if sum(run.gpus for run in lower) + view.free.idle < job.gpus:
        return ()
    lower.sort(key=lambda run: (run.job.priority, -run.start, run.job.id))
    gone: list[Running] = []
    enough = False
    for run in lower:
        view.try_without(run)
        gone.append(run)
        if enough := view.fits(job) is not None:
            break
    if enough:
        gone = _needed(view, job, gone)
    for run in gone:
        view.undo(run)
    return tuple(run.job.id for run in gone) if enough else ()


def _needed(view: ClusterView, job: SimulatedJob, gone: list[Running]) -> list[Running]:
    """Spares every victim that the job can do without; the last one is needed, since it did not fit before."""
    needed = gone[-1:]
    for run in gone[:-1]:
        view.undo(run)
        if view.fits(job) is None:
            view.try_without(run)
            needed.append(run)
    return needed
