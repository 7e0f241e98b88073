"""Verification: which candidates of a chain or a tree the target accepts, and the token that follows.

Pure functions of randomness, p, the target's distribution, and q, the distribution that a candidate was drawn from,
both after all logits processors. `docs/verification.md` and `docs/dyspec.md` explain the formulas. CUDA graphs use the
same functions. A CPU computes the rows that a test needs, an accelerator all rows at once, so that a round has one
read. Tests compare with the papers' loops in `tests/support/enumeration/readable_verification.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.caches.masks import span
from hf_specdecpp.sampling.randomness import Randomness, waits_for_reads, widest
from hf_specdecpp.trees.tree import DraftTree

Verification = Literal["block", "token"]


def verify_greedy(tree: DraftTree, likeliest: Callable[[int], int]) -> tuple[list[int], int]:
    """Accept nodes of a tree or a chain from the root down while they are the target's likeliest tokens. `likeliest`
    returns the likeliest token after the root or an accepted node. Returns the accepted nodes without the root, and the
    token after them."""
    path: list[int] = []
    node = 0
    while True:
        choice = likeliest(node)
        if (child := tree.child(node, choice)) is None:
            return path, choice
        path.append(child)
        node = child


def verify_sampled(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """Accept drawn candidates of a chain such that the emitted tokens have exactly the distribution p.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`; ids, or a tensor of them.
        p: `[k + 1, vocab]` probabilities of the target, at the place of each candidate and after the last.
        q: `[k, vocab]` probabilities of the draft.
        verification: `"block"` (arXiv 2403.10444), or `"token"` (arXiv 2211.17192, Algorithm 1), which accepts fewer.

    Returns:
        Number of accepted candidates, and the next token: from p if all are accepted (bonus), else from the rest of p.
    """
    if waits_for_reads(p.device):
        return randomness.outcome(*outcomes(candidates, None, p, q, verification))
    ratios, accepted, number = chain_ratios(candidates, p, q), 0, len(candidates)
    carries = carries_of(ratios, verification)

    def left(count: int) -> Tensor:
        row = slice(count, count + 1)
        return leftovers(carries[row], p[row], q[row])[0]

    def passes(count: int) -> bool:
        c = float(carries[count])
        if not randomness.bernoulli(c):  # h_i <= c_i: most tests that fail need no sum
            return False
        return count == number or c == 1.0 or randomness.bernoulli(float(block_tests(carries[count], left(count))) / c)

    if verification == "token":
        chances = ratios.tolist()
        while accepted < number and randomness.bernoulli(min(1.0, chances[accepted])):
            accepted += 1
    else:
        accepted = next(count for count in range(number, -1, -1) if passes(count))
    rest = left(accepted)
    return accepted, int(randomness.categorical(or_p(rest, p[accepted])))


def outcomes(
    candidates: Sequence[int] | Tensor, count: Tensor | None, p: Tensor, q: Tensor, verification: Verification
) -> tuple[Tensor, Tensor]:
    """Return the tests of `verify_sampled`, and weights of the token after each number of accepted candidates.

    Let r_i = p(y_i) / q(y_i), c_0 = 1 and c_i = min(1, c_{i-1} r_i). As a block, test i passes with probability h_i
    (`block_tests`), and the next token is drawn from norm((c_i p - q)+), or from p after the last candidate.

    Example: candidate 0, p = [0.5, 0.5], q = [0.75, 0.25]: the tests are [1, 2/3], the weights after a rejection [0,
    0.25].

    Args:
        candidates: `[..., k]`, the i-th drawn from `q[i]`.
        count: `[...]`, number of submitted candidates, if the rest are padding; `None`: all.
        p, q: `[..., k + 1, vocab]` and `[..., k, vocab]`, probabilities of the target and of the draft.

    Returns:
        `[..., k + 1]` probabilities that tests 0 to k pass: the last that does gives the number, 0 if none does. `[...,
        k + 1, vocab]` weights.
    """
    ratios = chain_ratios(candidates, p, q)
    if count is not None:  # without q nothing is left out of p after the last candidate
        drawn = span(ratios.shape[-1], q.device) < count[..., None]
        ratios, q = torch.where(drawn, ratios, 0.0), q * drawn[..., None]
    carries = carries_of(ratios, verification)
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if verification == "block" else as_tests(token_weights(ratios))
    return tests, or_p(left, p)


def or_p(left: Tensor, p: Tensor) -> Tensor:
    """Weights `[..., vocab]` of the token after a rejection: `left`, or p if `left` is all 0. Rounding can cause
    rejections although p equals q."""
    return torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)


def chain_ratios(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p(y_i) / q(y_i) of each candidate, `[..., k]` in the widest dtype; 0 if p or q is nan, so that the candidate is
    rejected. `p` may have further rows."""
    columns = torch.as_tensor(candidates, dtype=torch.int64, device=p.device)[..., None]
    p_of, q_of = (probs[..., : columns.shape[-2], :].gather(-1, columns)[..., 0] for probs in (p, q))
    return (p_of / q_of.to(widest(q.device))).nan_to_num_(0.0)


def as_float32(scores: Tensor, greedy: bool = False) -> Tensor:
    """Processed scores `[..., vocab]`, in float32 if they are of half precision, which a processor may return. Their
    softmax, or argmax if `greedy`, is that of plain `generate()`, whose softmax rounds in the scores' own precision."""
    if scores.dtype not in (torch.bfloat16, torch.float16):
        return scores
    return scores.float() if greedy else scores.softmax(-1).float().log()


def likeliest_tokens(scores: Tensor) -> list[int]:
    """`scores.argmax(-1)` of `[n, vocab]`. On a CPU numpy is ten times faster than torch: 5 us a token."""
    if scores.device.type == "cpu":
        return as_float32(scores, greedy=True).detach().numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def sibling_tests(
    p: Tensor, q: Tensor, tokens: Iterable[Tensor], owed: Tensor, exist: Iterable[Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tests of the children of a node, one after another, and what remains for the node itself.

    The node must be accepted with probability a, alone or with nodes below it, and be followed by token x with
    probability M(x) = a p(x). Its child y, drawn from D, must be accepted with probability min(1, M(y) / D(y)). If y
    and all nodes below it are rejected, then with s = sum of (M - D)+,

        M <- (M - D)+ / (s + 1 - a),    a <- s / (s + 1 - a),    D <- norm(D without y).

    Rows are not divided: M = U / R with R = sum(U) + 1 - a for the first a, D = q / Z, and U <- (U - f q)+ with f = R /
    Z. With a = 1 these are the tests of DySpec's Algorithm 3.

    Example: for p = [0.5, 0.3, 0.2], a = 1, the children 1 and 0 and q = [0.2, 0.6, 0.2]: (0.3, 1), then (0.3, 0.75)
    with R = 0.3 and Z = 0.4, then 1 and U = [0.15, 0, 0].

    Args:
        p: `[..., vocab]`, the target's distribution after the node.
        q: `[..., vocab]`; the first child was drawn from q, each further child from q without the earlier ones.
        tokens: `[...]`, the children.
        owed: `[...]`, a.
        exist: bool `[...]` for each child, whether it exists; by default all do.

    Yields:
        For each child U(y) and f, `[...]`, for `acceptance_of`; at last the remaining a `[...]` and the weights `[...,
        vocab]` of the token after the node; if they are all 0, p is used.
    """
    mass, missing, total = p * owed[..., None], 1.0 - owed, torch.ones_like(owed)
    left, share, before = owed, total, None
    for token, exists in zip(tokens, repeat(None) if exist is None else exist, strict=False):
        if before is not None:
            q = q.scatter(-1, before, 0.0)
            share = total / q.sum(-1)
        if exists is not None:
            share = torch.where(exists, share, 0.0)
        before = token[..., None]
        yield mass.gather(-1, before)[..., 0], share
        mass = torch.addcmul(mass, share[..., None].to(q.dtype), q, value=-1.0).clamp_min_(0.0)
        left = mass.sum(-1)
        total = missing + left
    # If p is nan, the node keeps its probability.
    yield torch.where(total > 0.0, left / total, owed), mass


def acceptance_of(mass: Tensor, share: Tensor, q: Tensor) -> Tensor:
    """min(1, M(y) / D(y)), from U(y) (`mass`) and f (`share`) of `sibling_tests`, and q(y); nan if p or q is nan."""
    return (mass / (share * q)).clamp_max(1.0)


def leftovers(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(c_i p - q)+ from c `[..., n]`, p `[..., n, vocab]` and q `[..., k, vocab]`; c_i p in rows beyond k."""
    left = p * carries[..., None].to(p.dtype)
    left[..., : q.shape[-2], :].sub_(q)
    return left.clamp_min_(0.0)


def block_tests(carries: Tensor, left: Tensor) -> Tensor:
    """Tests h_i = s_i / (s_i + 1 - c_i), `[..., n]`, from c_i `[..., n]` and the `leftovers`, whose sums are s_i.

    After the last candidate s_i = c_i, so h_i = c_i. If c_i = 1 and s_i = 0, the next candidate is always accepted, and
    h_i (0 here) does not matter. If p or q is nan, s_i = c_i as after the last candidate, so no further candidate
    counts."""
    sums = left.sum(-1, dtype=carries.dtype)
    sums = torch.where(sums.isnan(), carries, sums)
    return sums / (1.0 - carries).add_(sums).clamp_min_(torch.finfo(sums.dtype).tiny)


def token_weights(ratios: Tensor) -> Tensor:
    """Probability that i candidates are accepted token by token, `[..., k + 1]`, from their p / q `[..., k]`.

    Example: [0.5, 2] gives [0.5, 0, 0.5]."""
    accepts, one = ratios.clamp_max(1.0), ratios.new_ones((*ratios.shape[:-1], 1))
    return torch.cat((one, accepts.cumprod(-1)), dim=-1) * torch.cat((1.0 - accepts, one), dim=-1)


def as_tests(weights: Tensor) -> Tensor:
    """Tests from the last to the first such that each is the first to pass with the probability in `weights` `[...,
    n]`; 0 where its weight and all earlier weights are 0.

    Example: [0.375, 0.375, 0.25] gives [1, 0.5, 0.25]."""
    return (weights / weights.cumsum(-1)).nan_to_num_(0.0)


def carries_of(ratios: Tensor, verification: Verification) -> Tensor:
    """c_0 = 1, c_i = min(1, c_{i-1} r_i), `[..., k + 1]`, from the ratios r_i `[..., k]`. Token by token all are 1.

    Example: [2, 0.5, 0.5, 4, 1] gives [1, 1, 0.5, 0.25, 1, 1]. With S_i the product of the first i ratios, c_i is S_i
    divided by the largest S_j with j <= i, which needs no loop."""
    if verification == "token":
        return torch.ones_like(functional.pad(ratios, (1, 0)))
    sums = functional.pad(ratios.log().cumsum(-1), (1, 0))
    return (sums - sums.cummax(-1).values).exp()


# Trees. ------------------------------------------------------------------------------------------------------------


def verify_tree(
    tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness, verification: Verification
) -> tuple[list[int], int]:
    """Accept drawn nodes of a tree such that the emitted tokens have exactly the distribution p.

    `"block"` is traversal verification (arXiv 2505.12398), for siblings drawn without replacement: a node is tested
    after all nodes below it, with the probability that their rejections have left. `"token"` is Algorithm 3 of DySpec
    (arXiv 2410.11744), which accepts fewer: from the root down, with the bonus at a leaf.

    Args:
        tree: its siblings were drawn one after another, without replacement.
        p: gives `[vocab]`, the target's distribution after a node. `"block"` calls it for nodes with children until one
            is accepted, and for an accepted leaf; `"token"` for visited nodes.

    Returns:
        The accepted nodes without the root, and the token that follows them, drawn from the part of p that rejected
        children left, or from p if the last node has no children.
    """
    if verification == "token":
        path = [0]
        while True:
            child, token = test_children(tree, path[-1], p(path[-1]), randomness)
            if child is None:
                return path[1:], token
            path.append(child)
    stack = [(0, child_tests(tree, 0, p, torch.ones((), dtype=torch.float32, device="cpu")))]
    while True:
        node, tests = stack[-1]
        child, chance, mass = next(tests)
        if child is not None:
            stack.append((child, child_tests(tree, child, p, chance)))
        elif len(stack) == 1 or randomness.bernoulli(float(chance)):  # the root always passes
            rest = p(node) if mass is None or not float(mass.sum()) > 0.0 else mass
            return [each for each, _ in stack[1:]], int(randomness.categorical(rest))
        else:
            stack.pop()


def test_children(tree: DraftTree, node: int, p: Tensor, randomness: Randomness) -> tuple[int | None, int]:
    """Test the children of a node by Algorithm 3, given the target's distribution `p` `[vocab]` after the node. Returns
    the accepted child and its token, or `None` and a token drawn from the part of p that the children left."""
    tests = child_tests(tree, node, lambda _: p, p.new_ones(()))
    child, chance, mass = next(tests)
    while child is not None and not randomness.bernoulli(float(chance)):
        child, chance, mass = next(tests)
    if child is not None:
        return child, tree.tokens[child]
    return None, int(randomness.categorical(p if mass is None else or_p(mass, p)))


def child_tests(
    tree: DraftTree, node: int, p: Callable[[int], Tensor], owed: Tensor
) -> Iterator[tuple[int | None, Tensor, Tensor | None]]:
    """Yield each child of a node with its acceptance probability (`sibling_tests`), at last `None`, the remaining
    `owed`, and weights of the token after the node (`None`: p). `owed`: probability with which the node must be
    accepted."""
    if not tree.children[node] or not owed:  # no tests below
        yield None, owed, None
        return
    after, tokens = p(node), [tree.tokens[child] for child in tree.children[node]]
    columns, q = torch.tensor(tokens, device=after.device), tree.q(node).to(after.device)
    tests = sibling_tests(after, q, columns.unbind(), owed)
    for child, of_q in zip(tree.children[node], q[columns].unbind(), strict=True):
        yield child, acceptance_of(*next(tests), of_q).nan_to_num(0.0), None
    left, mass = next(tests)
    yield None, left, mass


def follow_tree(tree: DraftTree, path: list[int], token: int, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Continue a sampled `path` and `token` along looked-up candidates; return the longer path and its next token.

    A looked-up candidate is accepted if it equals the token drawn from the target's distribution: first `token`, then
    the token drawn after that candidate, and so on. `draw` draws a token after a node, and is called for accepted nodes
    only."""
    node = path[-1] if path else 0
    while (found := tree.looked_up.get((node, token))) is not None:
        path, node = [*path, found], found
        token = draw(node)
    return path, token
