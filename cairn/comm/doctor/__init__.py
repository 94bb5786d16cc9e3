"""Why is it slow, or why does it hang: the cause, with the evidence that names it.

Readers and rules are pure; only `ranks` and `inject` start processes and reach torch.
"""
