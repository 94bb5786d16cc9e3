"""Jobs on an engine that exists (Ray, Slurm, Kubernetes, this machine), what breaks there, and what it costs.

    job.toml -spec-> Job -resolve-> Plan -backend-> ranks through torch elastic -> why it does not run, in one line

Launches argv, never Python objects; imports neither torch nor the trainer nor the server.
"""
