"""Labs about Linux: one file each, found by `cairn.labs.catalogue`."""
