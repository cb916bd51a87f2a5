"""Defines the factors for computing exp and log by the hardware's exp2 and log2. The host uses `.value`."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
