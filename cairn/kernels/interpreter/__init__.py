"""Repairs of Triton 3.6's CPU interpreter: one function for each fault, each with its reason.

    arithmetic    bfloat16 and 8-bit floats; minima and maxima
    reductions    tl.reduce and tl.associative_scan in few steps
    memory        every pointer is checked; descriptors; atomics
    language      loops, arguments, assertions, inline assembly, libdevice, autotuning

Importing these changes nothing: `cairn.kernels.interpret` applies them. They reach into
private parts of triton.runtime.interpreter, so `interpret.install` refuses any other Triton than 3.6.
"""
