"""adjtimex(2), read only. Source: linux/timex.h."""

from __future__ import annotations

import ctypes
import os


class _Timex(ctypes.Structure):
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),  # time, tick, pps values and padding: more than enough room
    ]


def read_adjtimex() -> tuple[int, int, int]:
    """Clock state, status bits (0x40 = unsynchronised) and estimated error in microseconds.

    Needs no privilege. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex(modes=0)
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "adjtimex")
    return state, timex.status, timex.esterror
