"""How ranks exchange bytes: schedules that are proved, what they cost, and what NCCL would do.

The pure parts (`schedule`, `cost`, `nccl_model`, `nccl_tuner`, `published`) never reach torch.
"""
