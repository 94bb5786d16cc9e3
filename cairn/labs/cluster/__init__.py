"""Labs about cluster and failures: one file each, found by `cairn.labs.catalogue`."""
