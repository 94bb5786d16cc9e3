"""Simulation of collectives on a fabric: links, queues and chunks instead of one alpha and one beta.

Pure numpy: no torch, no clock, no I/O.
"""
