"""Grid barrier: exchange of values between the programs of one launch at every step.

A cooperative launch keeps all programs resident, so that they may wait for each other. Values written by one program
are read by the others from the L2 cache; a counter in memory holds the number of programs of a group that have written.
Waits time out: after a second or more, far longer than any step takes, a program stops waiting and continues with NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTER_STRIDE = tl.constexpr(32)
"""Integers from one counter to the next: each counter has its own cache line."""

SPINS = tl.constexpr(1 << 21)
"""Polls of a counter, more than half a microsecond each, before a wait times out."""

_WAIT = tl.constexpr("""{
.reg .pred more;
.reg .u32 seen, tries;
mov.u32 tries, 0;
again:
ld.acquire.gpu.global.u32 seen, [$1];
setp.lt.s32 more, seen, $2;
add.u32 tries, tries, 1;
setp.lt.and.u32 more, tries, $3, more;
@more bra again;
mov.u32 $0, seen;
}""")


_ARRIVE = tl.constexpr("""{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first red.release.gpu.global.add.u32 [$1], 1;
mov.u32 $0, thread;
}""")


@triton.jit
def arrive(counter):
    """Adds one to the counter with release semantics: who sees it also sees all earlier stores of this program."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(_ARRIVE, "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait(counter, target, spins):
    """Waits until the counter has reached the target.

    Every thread polls for itself, which saves a barrier within the program.

    Returns:
        The number of polls that the next wait may use: ``spins``, or 0 after a timeout.
    """
    seen = tl.inline_asm_elementwise(
        _WAIT, "=r,l,r,r", [counter.to(tl.int64), target, spins], dtype=tl.int32, is_pure=False, pack=1
    )
    return tl.where(seen < target, 0, spins)
