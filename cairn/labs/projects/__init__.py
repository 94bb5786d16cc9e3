"""Labs about the four projects: one file each, found by `cairn.labs.catalogue`."""
