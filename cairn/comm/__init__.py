"""Communication between ranks: proven collective schedules, their cost, a model of NCCL, and transfers.

The pure parts (`schedule`, `cost`, `nccl_model`, `nccl_tuner`, `published`, `simulate`, and the readers and rules of
`doctor`) never reach torch.
"""
