"""access(2) with its errno, which ``os.access`` swallows."""

from __future__ import annotations

import ctypes
import os


def check_access(path: str) -> None:
    """Raise OSError when reading and writing ``path`` would be refused; opens nothing.

    The kernel asks the device cgroup here as it does on open(2) (fs/namei.c, inode_permission):
    EPERM is the cgroup, EACCES the mode bits.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.access(os.fsencode(path), os.R_OK | os.W_OK) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
