"""Converts exp and log to the hardware's exp2 and log2. `.value` is the host's number."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
