"""Labs about PyTorch's execution model: one file each, found by `cairn.labs.catalogue`."""
