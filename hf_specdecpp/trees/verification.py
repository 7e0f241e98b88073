"""Verification: which candidates of a chain or a tree the target accepts, and the token that follows.

Pure functions of p, q and randomness. p is the target's distribution, q the one that a candidate was really drawn from,
both after all logits processors. `docs/verification.md` and `docs/dyspec.md` explain the formulas. The same functions
of tensors run on every device and inside CUDA graphs: a host asks them about one row after the other, and about those
nodes of a tree alone whose p a test needs; a device about all rows at once, so that a round has one read.
`tests/support/enumeration/readable_verification.py` has the loops of the papers, which tests compare with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.sampling.randomness import Randomness, waits_for_reads, widest
from hf_specdecpp.trees.tree import DraftTree

Verification = Literal["block", "token"]


def verify_greedy(candidates: list[int], scores: Tensor) -> tuple[int, int]:
    """Accept candidates while they are the target's likeliest tokens.

    Args:
        candidates: k tokens.
        scores: `[k + 1, vocab]`, the target's processed logits at each candidate and after the last.

    Returns:
        Number of accepted candidates, and the token that follows them.
    """
    choices = likeliest_tokens(scores)
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def verify_sampled(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """Accept candidates that were drawn; what is emitted is distributed exactly as p.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`; ids, or a tensor of them.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.
        verification: `"block"` (arXiv 2403.10444), or `"token"` (arXiv 2211.17192, Algorithm 1), which accepts fewer.

    Returns:
        Number of accepted candidates, and the token that follows them: from what is left of p after a rejection, from p
        (the bonus) when all were accepted.
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
    """The tests of the number of accepted candidates, from the last to the first, and what follows each number.

    Let r_i = p(y_i) / q(y_i), c_0 = 1 and c_i = min(1, c_{i-1} r_i). As a block, i candidates pass with chance h_i
    (`block_tests`), and the token after them is drawn from norm((c_i p - q)+), or from p after the last one.

    For one candidate 0, p = [0.5, 0.5] and q = [0.75, 0.25] the tests are [1, 2/3], and [0, 0.25] follows a rejection.

    Args:
        candidates: `[..., k]`, the i-th drawn from `q[i]`.
        count: `[...]`, how many of them are submitted, in which case `q` may have more rows; `None`: all.
        p, q: `[..., k + 1, vocab]` and `[..., k, vocab]`, probabilities of the target and of the draft.

    Returns:
        `[..., k + 1]` chances that each test passes, where none passes the first counts; and `[..., k + 1, vocab]`
        weights of the token that follows.
    """
    ratios = chain_ratios(candidates, p, q)
    if count is not None:  # without q nothing is left out of p after the last candidate
        drawn = torch.arange(ratios.shape[-1], device=q.device) < count[..., None]
        ratios, q = torch.where(drawn, ratios, 0.0), q * drawn[..., None]
    carries = carries_of(ratios, verification)
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if verification == "block" else as_tests(token_weights(ratios))
    return tests, or_p(left, p)


def or_p(left: Tensor, p: Tensor) -> Tensor:
    """Weights `[..., vocab]` of the token that follows a rejection: `left`, or p where nothing is left. In floating
    point a candidate can be rejected although p and q are equal to rounding."""
    return torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)


def chain_ratios(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p(y_i) / q(y_i) of each candidate, `[..., k]` in the widest dtype; 0 where p or q is nan, so that no candidate is
    accepted there. `p` may have rows after them."""
    columns = torch.as_tensor(candidates, dtype=torch.int64, device=p.device)[..., None]
    p_of, q_of = (probs[..., : columns.shape[-2], :].gather(-1, columns)[..., 0] for probs in (p, q))
    return (p_of / q_of.to(widest(q.device))).nan_to_num_(0.0)


def as_float32(scores: Tensor, greedy: bool = False) -> Tensor:
    """Processed scores `[..., vocab]`; of half precision, which a processor may return, as float32 whose softmax, or
    argmax where `greedy`, is that of plain `generate()`: its softmax rounds in the scores' own precision."""
    if scores.dtype not in (torch.bfloat16, torch.float16):
        return scores
    return scores.float() if greedy else scores.softmax(-1).float().log()


def likeliest_tokens(scores: Tensor) -> list[int]:
    """`scores.argmax(-1)` of `[n, vocab]`, which on a CPU numpy finds ten times faster than torch: 5 us a token."""
    if scores.device.type == "cpu":
        return as_float32(scores, greedy=True).detach().numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def acceptance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y) / q(y)): the chance that the verifier accepts y, `token` (SpecDec++, section 3.2), `[...]`; 0 where p
    or q is nan."""
    p_of, q_of = (probs.gather(-1, token[..., None])[..., 0] for probs in (p, q))
    return (p_of / q_of).clamp_max(1.0).nan_to_num(0.0)


def sibling_tests(
    p: Tensor, q: Tensor, tokens: Iterable[Tensor], owed: Tensor, exist: Iterable[Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the children of a node are tested with, one after another, and what is left to the node itself.

    A node has to be accepted with chance a, alone or with nodes below it, and to be followed by each x with chance
    M(x) = a p(x). Its child y, drawn from D, has to be accepted with chance min(1, M(y) / D(y)). The rejection of y and
    of all nodes below it leaves, with s = sum of (M - D)+,

        M <- (M - D)+ / (s + 1 - a),    a <- s / (s + 1 - a),    D <- norm(D without y).

    Rows are not divided: M = U / R with R = sum(U) + 1 - a for the first a, D = q / Z, and U <- (U - f q)+ with
    f = R / Z. With a = 1 these are the tests of DySpec's Algorithm 3.

    For p = [0.5, 0.3, 0.2], a = 1, the children 1 and 0 and q = [0.2, 0.6, 0.2]: (0.3, 1), (0.3, 0.75), where R is 0.3
    and Z is 0.4, then 1 and U = [0.15, 0, 0].

    Args:
        p: `[..., vocab]`, the target's distribution after the node.
        q: `[..., vocab]`, what the first child was drawn from; each further one was drawn from q without the others.
        tokens: `[...]`, the children.
        owed: `[...]`, a.
        exist: bool `[...]`, of each child whether there is one; there is by default.

    Yields:
        For each child U(y) and f, `[...]`, for `acceptance_of`; at last a `[...]` and weights `[..., vocab]` of the
        token after the node, which p gives where they are 0.
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
    # Where p is nan, no child counts.
    yield torch.where(total > 0.0, left / total, owed), mass


def acceptance_of(mass: Tensor, share: Tensor, q: Tensor) -> Tensor:
    """min(1, M(y) / D(y)), by U(y) and f of `sibling_tests` and by q(y); nan where p or q is nan."""
    return (mass / (share * q)).clamp_max(1.0)


def leftovers(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(c_i p - q)+, by c_i `[..., n]` and p `[..., n, vocab]`; c_i p in rows for which q `[..., k, vocab]` has none."""
    left = p * carries[..., None].to(p.dtype)
    left[..., : q.shape[-2], :].sub_(q)
    return left.clamp_min_(0.0)


def block_tests(carries: Tensor, left: Tensor) -> Tensor:
    """h_i = s_i / (s_i + 1 - c_i), `[..., n]`, by c_i `[..., n]` and the `leftovers`, whose sums are s_i.

    After the last candidate s_i is c_i, and so is h_i. Where c_i is 1 and nothing is left, the candidate after it is
    always accepted, and h_i, which is 0 here, does not matter. Where p or q is nan, no further candidate counts: s_i is
    c_i as after the last.
    """
    sums = left.sum(-1, dtype=carries.dtype)
    sums = torch.where(sums.isnan(), carries, sums)
    return sums / (1.0 - carries).add_(sums).clamp_min_(torch.finfo(sums.dtype).tiny)


def token_weights(ratios: Tensor) -> Tensor:
    """The chance that i candidates are accepted token by token, `[..., k + 1]`, by their p / q `[..., k]`.

    For [0.5, 2]: [0.5, 0, 0.5].
    """
    accepts, one = ratios.clamp_max(1.0), ratios.new_ones((*ratios.shape[:-1], 1))
    return torch.cat((one, accepts.cumprod(-1)), dim=-1) * torch.cat((1.0 - accepts, one), dim=-1)


def as_tests(weights: Tensor) -> Tensor:
    """Tests from the last to the first, of which each is the first that passes with the chance `weights` `[..., n]`; 0
    where neither the test nor any that comes later can be the first.

    For [0.375, 0.375, 0.25]: [1, 0.5, 0.25].
    """
    return (weights / weights.cumsum(-1)).nan_to_num_(0.0)


def carries_of(ratios: Tensor, verification: Verification) -> Tensor:
    """c_i, `[..., k + 1]`: `carried` as a block, 1 token by token."""
    return carried(ratios) if verification == "block" else torch.ones_like(functional.pad(ratios, (1, 0)))


def carried(ratios: Tensor) -> Tensor:
    """c_0 = 1, c_i = min(1, c_{i-1} r_i), `[..., k + 1]`, of the ratios r_i `[..., k]`.

    For [2, 0.5, 0.5, 4, 1]: [1, 1, 0.5, 0.25, 1, 1]. S_i being the product of the first i ratios, c_i is S_i divided by
    the largest S_j with j <= i, which needs no loop.
    """
    sums = functional.pad(ratios.log().cumsum(-1), (1, 0))
    return (sums - sums.cummax(-1).values).exp()


# Trees. ------------------------------------------------------------------------------------------------------------


def verify_tree_greedy(tree: DraftTree, likeliest: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk down the tree along the `likeliest` tokens, which is asked about nodes on the way only: the accepted nodes,
    and the token that follows them."""
    path: list[int] = []
    node = 0
    while True:
        choice = likeliest(node)
        if (child := tree.child(node, choice)) is None:
            return path, choice
        path.append(child)
        node = child


def verify_tree(
    tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness, verification: Verification
) -> tuple[list[int], int]:
    """Accept nodes that were drawn; what is emitted is distributed exactly as p.

    `"block"` is traversal verification (arXiv 2505.12398), for siblings drawn without replacement: a node is tested
    after all nodes below it, with what their rejections have left of its chance. `"token"` is Algorithm 3 of DySpec
    (arXiv 2410.11744), which accepts fewer: from the root down, with the bonus at a leaf.

    Args:
        tree: its siblings were drawn one after another, without replacement.
        p: gives `[vocab]`, the target's distribution after a node. `"block"` asks about nodes that have children,
            until a node is accepted, `"token"` about nodes on the way.

    Returns:
        The accepted nodes, and the token that follows them: from what the rejected children left of p, or from p itself
        where there were no children.
    """
    if verification == "token":
        path = [0]
        while True:
            child, token = test_children(tree, path[-1], p(path[-1]), randomness)
            if child is None:
                return path[1:], token
            path.append(child)
    stack = [(0, _tests(tree, 0, p, torch.ones(())))]
    while True:
        node, tests = stack[-1]
        child, chance, mass = next(tests)
        if child is not None:
            stack.append((child, _tests(tree, child, p, chance)))
        elif len(stack) == 1 or randomness.bernoulli(float(chance)):  # the root always passes
            rest = p(node) if mass is None or not float(mass.sum()) > 0.0 else mass
            return [each for each, _ in stack[1:]], int(randomness.categorical(rest))
        else:
            stack.pop()


def _tests(
    tree: DraftTree, node: int, p: Callable[[int], Tensor], owed: Tensor
) -> Iterator[tuple[int | None, Tensor, Tensor | None]]:
    """`child_tests` of a node that has to be accepted with the chance `owed`, each with its child, `None` at last."""
    children = tree.children[node]
    if not children or not owed:  # nothing to find out below
        yield None, owed, None
        return
    for child, (chance, mass) in zip((*children, None), child_tests(tree, node, p(node), owed), strict=True):
        yield child, chance, mass


def test_children(tree: DraftTree, node: int, p: Tensor, randomness: Randomness) -> tuple[int | None, int]:
    """A level of Algorithm 3: the accepted child of a node, if any, and the token after the node. `p`: `[vocab]`."""
    tests = child_tests(tree, node, p, torch.ones((), device=p.device))
    # zip asks for the next sibling first: nothing is computed behind an accepted one.
    for child, (chance, _) in zip(tree.children[node], tests, strict=False):
        if randomness.bernoulli(float(chance)):
            return child, tree.tokens[child]
    _, left = next(tests)
    return None, int(randomness.categorical(or_p(left, p)))


def child_tests(tree: DraftTree, node: int, p: Tensor, owed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The chance of each child of a node that has to be accepted with the chance `owed`; at last what `sibling_tests`
    leaves. `p`: `[vocab]`, the target's distribution after the node."""
    tokens = torch.tensor([tree.tokens[child] for child in tree.children[node]], dtype=torch.long, device=p.device)
    q = tree.q(node).to(p.device) if len(tokens) else p
    tests = sibling_tests(p, q, tokens.unbind(), owed)
    for of_q in q[tokens].unbind():
        mass, share = next(tests)
        yield acceptance_of(mass, share, of_q).nan_to_num(0.0), mass
    yield next(tests)


def follow_tree(tree: DraftTree, path: list[int], token: int, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Go on from what was verified, `path` and `token`, along candidates that were looked up: the same, further down.

    Such a candidate is one token for certain, so it is accepted exactly if it is what is drawn from the target's
    distribution: the token after the path may be one, then the token drawn after that, and so on. `draw` gives a token
    from the target's distribution after a node, and is asked about one node after the other.
    """
    node = path[-1] if path else 0
    while (found := tree.looked_up.get((node, token))) is not None:
        path, node = [*path, found], found
        token = draw(node)
    return path, token
