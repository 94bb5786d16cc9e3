"""Arguments of a decoder layer for the compiled kernels: addresses of its maps, norms, heads and KV blocks."""

import ctypes


class DecoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "inner", "down")),
        *((name, ctypes.c_void_p) for name in ("before_heads", "before_inner")),
        *((name, ctypes.c_void_p) for name in ("behind_out", "behind_down")),
        *((name, ctypes.c_void_p) for name in ("heads", "keys", "values")),
        *((name, ctypes.c_int32) for name in ("group", "angle")),
    )
