"""Labs about serving: one file each, found by `cairn.labs.catalogue`."""
