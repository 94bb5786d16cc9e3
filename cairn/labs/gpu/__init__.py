"""Labs about GPU and kernels: one file each, found by `cairn.labs.catalogue`."""
