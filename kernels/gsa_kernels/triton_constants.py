"""Define two factors. With them, kernels compute exp and log by the hardware's exp2 and log2. On the host, `.value` is
the number."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
