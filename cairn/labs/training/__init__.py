"""Labs about distributed training: one file each, found by `cairn.labs.catalogue`."""
