"""A collective as data: who sends which chunk to whom, in which order.

    generator --> Plan --> Schedule --> verify | interpret | (execute, simulate, export)
    ring.py       plan     ops          one object, every use

`ops` is the form, `plan` builds it, `catalogue` names every generator, `verify` proves one.
Pure: numpy, no torch, no socket, no clock.
"""
