"""Collective schedules as data: which rank sends which chunk to which rank, in which order.

    algorithm -----> Plan --> Schedule --> verify | interpret | (execute, simulate, export)
    algorithms.py    plan     ops          one object for every use

`ops` defines the representation, `plan` builds it, `catalogue` lists all algorithms, `verify` proves one correct.
Pure functions over numpy: no torch, no socket, no clock.
"""
