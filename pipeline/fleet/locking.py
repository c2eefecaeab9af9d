"""Taking a lock only if nobody has it: a fleet has other things to do than to wait."""

from __future__ import annotations

import time

from pipeline.locks import HEARTBEAT_S, STALE_AFTER_S, Lock, is_held


def try_lock(lock: Lock) -> bool:
    """Take a lock that is free, or that a dead process left; False where somebody lives who has it.

    Returns at once, but for one thing: that a holder on another machine is dead is known only after a second look,
    a heartbeat later.
    """
    if lock.acquire(timeout=0):
        return True
    if is_held(lock.path, stale_after=STALE_AFTER_S, now=time.time()):
        return False
    return lock.acquire(timeout=HEARTBEAT_S + 1)
