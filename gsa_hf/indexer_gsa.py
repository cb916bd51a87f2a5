"""Compute the indexer in plain torch. The indexer scores all keys for each query. The scores give the query's budget
(number of keys), the selected keys, and the indexer loss.

Shapes have B sequences, L queries of this forward pass, Lk keys (including cached keys), and HI indexer heads of size
DI.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

WEIGHT_LOGITS = {"plain": 64.0, "qsa": 1.0}
"""Maps each activation without head weights to a logit that makes all weights 1. The sigmoid of 64 rounds to 1."""


class IndexedTokens(NamedTuple):
    """Holds the indexer's projections of tokens."""

    queries: torch.Tensor
    """[B, L, HI, DI]"""
    keys: torch.Tensor
    """[B, L or Lk, DI]"""
    weights: torch.Tensor
    """[B, L, HI], logits of the head weights without their bias; constant if the indexer has no head weights"""


class GSAIndexer(nn.Module):
    """Computes the score I[t, s] of key s for query t. Each token has HI queries q[t, j], HI weights w[t, j], and a
    key k[s]. b_j and c_j are biases.
    sigmoid: I[t, s] = sum_j sigmoid(w[t, j] + c_j) * sigmoid(q[t, j] . k[s] / sqrt(DI) + b_j)
    relu:    I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s] / sqrt(DI))

    "plain" is sigmoid with all head weights 1, and "qsa" is relu with all head weights 1.
    """

    variance_ema: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.activation = "sigmoid" if config.indexer_activation in ("sigmoid", "plain") else "relu"
        self.temperature = config.indexer_temperature
        self.weight_logit = WEIGHT_LOGITS.get(config.indexer_activation)
        biased = self.activation == "sigmoid"
        self.wq = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.weights_proj = None
        if self.weight_logit is None:
            self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=biased)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.indexer_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.indexer_norm else None
        self.score_bias = nn.Parameter(torch.zeros(self.heads)) if biased else None
        learned = self.temperature == "learned"
        self.log_inverse_temperature = nn.Parameter(torch.zeros(1)) if learned else None
        # The moving average of the score variance from pretraining, constant here. With 0 budgets do not adapt.
        self.register_buffer("variance_ema", torch.zeros((), dtype=torch.float32))

    def forward(self, hidden_states: torch.Tensor, rotary: tuple[torch.Tensor, ...] | None) -> IndexedTokens:
        """Return the projections of this forward pass's tokens.

        Args:
            hidden_states: [B, L, d]; detached here, so the indexer's gradient does not reach the model
            rotary: cosines and sines [B, L, DI]; None without a rotary embedding
        """
        hidden_states = hidden_states.detach()
        queries = self.wq(hidden_states).unflatten(-1, (self.heads, self.head_dim))
        keys = self.wk(hidden_states)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if rotary is not None:
            cos, sin = rotary
            queries, keys = rotate(queries, cos[:, :, None], sin[:, :, None]), rotate(keys, cos, sin)
        if self.weights_proj is None:
            weights = keys.new_full((*keys.shape[:2], self.heads), self.weight_logit)
        elif self._bias_comes_later:
            weights = nn.functional.linear(hidden_states, parameter_of(self.weights_proj, "weight"))
        else:
            weights = self.weights_proj(hidden_states)
        return IndexedTokens(queries, keys, weights)

    @property
    def _bias_comes_later(self) -> bool:
        """Return whether `scores` must add c, the bias of the head weights, in fp32. If quantisation or an adapter
        replaced the projection of the head weights, the replacement has already added c."""
        return type(self.weights_proj) is nn.Linear

    @property
    def weight_bias(self) -> torch.Tensor | None:
        """Return c, [HI], None without c, or zeros if the head weights already include c."""
        if self.weights_proj is None or self.activation == "relu":
            return None
        if self._bias_comes_later:
            return parameter_of(self.weights_proj, "bias")
        return self.variance_ema.new_zeros(self.heads)

    @property
    def bias_of_scores(self) -> torch.Tensor | None:
        """Return b, [HI]."""
        return parameter_of(self, "score_bias")

    def scores(self, tokens: IndexedTokens) -> torch.Tensor:
        """Return I for all pairs of query and key, causal or not: fp32 [B, L, Lk], also under autocast."""
        with torch.autocast(tokens.keys.device.type, enabled=False):
            return self._scores(tokens)

    def _scores(self, tokens: IndexedTokens) -> torch.Tensor:
        keys = tokens.keys.float().transpose(1, 2)
        weights, weight_bias, score_bias = tokens.weights.float(), self.weight_bias, self.bias_of_scores
        if weight_bias is not None:
            weights = weights + weight_bias.float()
        if score_bias is not None:
            score_bias = score_bias.float()
        if self.activation == "sigmoid":
            weights = torch.sigmoid(weights)
        scores = keys.new_zeros(*weights.shape[:2], keys.shape[-1])
        for head in range(self.heads):  # only one [L, Lk] product is held at a time
            product = tokens.queries[:, :, head].float() @ keys * self.head_dim**-0.5
            product = torch.relu(product) if score_bias is None else torch.sigmoid(product + score_bias[head])
            scores = scores + weights[:, :, head, None] * product
        return scores

    def inverse_temperature(self) -> float | torch.Tensor:
        """Return beta of softmax(beta * I) in the loss."""
        if self.log_inverse_temperature is not None:
            return parameter_of(self, "log_inverse_temperature").float().exp()[0]
        return float(self.temperature)

    def _apply(self, fn: Any, recurse: bool = True) -> "GSAIndexer":
        """Move to another device or dtype, but keep `variance_ema` in fp32, because budgets depend on it."""
        before = self.variance_ema
        super()._apply(fn, recurse)
        if self.variance_ema.dtype != torch.float32:
            self.variance_ema = before.to(self.variance_ema.device)
        return self


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return a module's parameter or None, even outside the module's forward pass.

    With `device_map`, the accelerate library moves a module's offloaded weights to the device only during the module's
    forward pass. This function therefore calls the hooks that run before and after a forward pass.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return getattr(module, name)
    hook.pre_forward(module)
    found = getattr(module, name)
    hook.post_forward(module, None)
    return found


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of channels (i, i + channels / 2) of x, where `channels` is the number of angles."""
    channels = cos.shape[-1]
    turned, passed = x[..., :channels], x[..., channels:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, passed), -1) if passed.shape[-1] else turned


@torch.no_grad()
def select_keys(
    indexer: GSAIndexer,
    config: Any,
    scores: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Return the selection S_t, bool [B, L, Lk]: the k_t causal keys with the highest scores, and the local window.

    If scores are equal, the earlier key is selected.

    Args:
        config: the fields of indexer and selection
        scores: fp32 [B, L, Lk]
        visible: bool [B, L, Lk], the causal keys of each query
    """
    budget = budgets(scores, visible, indexer.variance_ema, config)
    # Adding 0 turns -0.0 into 0.0. A sort that compares bits would put one before the other.
    ranked = torch.where(visible, scores + 0.0, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    within = torch.arange(ranked.shape[-1], device=ranked.device) < budget[..., None]
    selected = torch.zeros_like(visible).scatter(-1, order, within) & visible
    if config.local_window > 0:
        # The window has the latest causal keys and the query's own key, so count from the end.
        from_end = visible.flip(-1).cumsum(-1).flip(-1)
        selected = selected | (visible & (from_end <= config.local_window))
    return selected


def budgets(scores: torch.Tensor, visible: torch.Tensor, ema: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the budgets k_t (numbers of keys to select) of equation 8 of GSA, int64 [B, L]. Queries with fewer than
    `dense_below` causal keys select all.

    The population variance of a query's scores is computed in two passes over its causal keys, with sums in fp64, so
    that rounding errors are small and do not grow with Lk.

    Args:
        visible: bool [B, L, Lk], the causal keys of each query
    """
    count = visible.sum(-1)
    size = count.clamp(min=1)
    mean = (torch.where(visible, scores, 0).sum(-1, dtype=torch.float64) / size).float()
    deviation = torch.where(visible, scores - mean[..., None], 0)
    variance = (deviation.square().sum(-1, dtype=torch.float64) / size).float().double()
    average = ema.double()
    if config.adaptive_k == "inverse":
        raw = config.index_topk * average / variance
    elif config.adaptive_k == "direct":
        raw = config.index_topk * variance / average
    else:
        raw = torch.full_like(variance, config.index_topk)
    raw = torch.where((average == 0) | raw.isnan(), float(config.index_topk), raw)
    budget = raw.floor().clamp(config.k_min, config.k_max).long()
    return torch.where(count < config.dense_below, count, torch.minimum(budget, count))


@torch.no_grad()
def mean_attention(q: torch.Tensor, k: torch.Tensor, attended: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the attention probabilities on the attended keys, averaged over the heads: fp32 [B, L, Lk].

    Args:
        q: [B, H, L, D]
        k: [B, Hkv, Lk, D]
        attended: bool [B, L, Lk]
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    total = torch.zeros(attended.shape, dtype=torch.float32, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for head in range(heads):
            logits = q[:, head].float() @ k[:, head // group].float().transpose(1, 2) * scaling
            total += logits.masked_fill(~attended, torch.finfo(torch.float32).min).softmax(-1)
    return torch.where(attended, total / heads, 0)


def indexer_loss(
    scores: torch.Tensor,
    probs: torch.Tensor,
    attended: torch.Tensor,
    visible: torch.Tensor,
    inverse_temperature: float | torch.Tensor,
) -> torch.Tensor:
    """Return the mean of KL(p_t || softmax_{s in S_t}(beta I[t, s])) over queries t (equations 14 and 15 of GSA).

    Padding and queries with one causal key do not count.

    Args:
        scores: fp32 [B, L, L], I with its graph
        probs: fp32 [B, L, L], p from `mean_attention`
        attended: bool [B, L, L], the selected keys S_t
        visible: bool [B, L, L], the causal keys
    """
    counted = visible.diagonal(dim1=1, dim2=2) & (visible.sum(-1) > 1)
    target = torch.where(attended, probs, 0)
    target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    logits = (scores * inverse_temperature).masked_fill(~attended, torch.finfo(torch.float32).min)
    log_q = torch.where(attended, logits.log_softmax(-1), 0)
    # p and q sum to 1, so adding q - p to p log(p / q) keeps the sum. Every term is then positive, and of second order
    # in r = log(q / p), so nothing cancels where p and q are close.
    r = log_q - torch.where(target > 0, target, 1).log()
    near = target * (torch.expm1(torch.where(r.abs() < 1, r, 0)) - r)
    far = log_q.exp() - target - target * r
    terms = torch.where((r.abs() < 1) & (target > 0), near, far)
    kl = torch.where(attended, terms, 0).sum(-1)
    return torch.where(counted, kl, 0).sum() / counted.sum().clamp(min=1)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        ctx.of_loss = {"dtype": loss.dtype, "device": loss.device}
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, torch.full((), ctx.weight, **ctx.of_loss), None


def with_indexer_loss(activations: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the activations unchanged. Their backward pass also differentiates `weight * loss`.

    Raises:
        ValueError: the model trains in fp16, and the gradient scaler would divide this unscaled gradient.
    """
    kind = activations.device.type
    scaled = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    if scaled or activations.dtype == torch.float16:
        raise ValueError(
            f"indexer_loss_coef is {weight} in training with float16 and a loss outside the model; use bfloat16, "
            "or pass labels to the model, or indexer_loss_coef=0"
        )
    return _WithLoss.apply(activations, loss, weight)


def check_that_it_learns(loss: torch.Tensor | None, coefficient: float) -> None:
    """Raise ValueError if no parameter can learn from the indexer loss."""
    if loss is None or not loss.requires_grad:
        raise ValueError(
            f"indexer_loss_coef is {coefficient} and no parameter of an indexer is trained; pass indexer_loss_coef=0, "
            "or give it to the configuration before the model is built, which leaves them trainable; with adapters, "
            "add wq, wk and weights_proj to their target modules"
        )
