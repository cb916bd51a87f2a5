"""Waits for other programs by a counter, which each program increments when its results are written."""

import triton
import triton.language as tl

_LOOK = tl.constexpr("""
{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    mov.u32 $0, 0x7fffffff;
    @first ld.acquire.gpu.global.u32 $0, [$1];
}
""")
"""Only the first thread polls, so that the counter's memory stays free. All other threads get the maximum."""


@triton.jit
def count_one(counter_ptr):
    """Announce that this program's results are written."""
    tl.debug_barrier()  # all threads of the program have written
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def await_count(counter_ptr, COUNT: tl.constexpr, COMPILED: tl.constexpr):
    """Wait until the counter is at least COUNT.

    Only one thread reads the counter. A barrier then makes the results of all counted programs visible to all threads
    (PTX ISA, memory consistency model). Loads must bypass the first-level cache. The interpreter runs programs one
    after the other, so it does not wait.
    """
    if COMPILED:
        seen = _look(counter_ptr)
        while seen < COUNT:
            seen = _look(counter_ptr)
        tl.debug_barrier()


@triton.jit
def _look(counter_ptr):
    return tl.inline_asm_elementwise(_LOOK, "=r,l", [counter_ptr], dtype=tl.int32, is_pure=False, pack=1)
