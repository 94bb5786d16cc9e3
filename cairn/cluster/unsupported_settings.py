"""Settings of a job that its engine does not support, reported before the start. Pure.

Nothing in here is a reason to refuse the job; those are in `resolve`.
"""

from cairn.cluster.spec import Health, Job


def unused(job: Job, engine: str) -> list[str]:
    """Describe each unsupported setting in one line."""
    notes = []
    if job.priority and engine in ("local", "ray"):
        notes.append(f"priority '{job.priority}' is not used: {engine} has no queue")
    if not job.gang and engine in ("local", "ray", "slurm"):
        notes.append(f"gang = false makes no difference: {engine} places all nodes at once")
    if job.topology.preferred in ("rack", "block") and engine == "ray":
        notes.append(f"ray can require one {job.topology.preferred}, but not prefer it")
    if job.topology.required == "rack" and engine == "slurm":
        notes.append(
            "slurm waits for one switch as long as its max_switch_wait says (5 min unless set)"
        )
    if job.kind == "serve" and job.scale.most > 1 and engine != "kubernetes":
        notes.append(f"`scale` is not used: on {engine} there is one copy")
    return notes + _unheard(job)


def _unheard(job: Job) -> list[str]:
    """Settings that need `cairn train` with in-memory checkpoints; an agent cannot observe hangs or stragglers."""
    kept, health, usual = job.checkpoint, job.health, Health()
    settings = {
        "checkpoint.tiers": "object" in kept.tiers or "memory" in kept.tiers,
        "checkpoint.interval": kept.interval != "recipe",
        "health.hang": health.hang != usual.hang,
        "health.straggler": health.straggler != usual.straggler,
    }
    set_here = ", ".join(name for name, is_set in settings.items() if is_set)
    others = [role.name for role in job.roles if role.argv[:2] != ["cairn", "train"]]
    if set_here and others:
        return [
            f"role '{name}' is not `cairn train`: it does not read {set_here}" for name in others
        ]
    if set_here and (job.restart.policy == "fail" or "memory" not in kept.tiers):
        why = (
            "restart.policy is fail"
            if job.restart.policy == "fail"
            else 'without "memory" in checkpoint.tiers'
        )
        return [f"{set_here}: not used, {why}"]
    return []
