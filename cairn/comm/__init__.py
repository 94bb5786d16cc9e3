"""How ranks exchange bytes: schedules that are proved, what they cost, and what NCCL would do.

The pure parts (`schedule`, `cost`, `nccl_model`, `nccl_tuner`, `published`, `simulate`, and the readers and rules of
`doctor`) never reach torch.
"""
