"""Log-likelihoods of a plan's requests: shared prefixes computed once, the head only where it is asked for.

A row's tree goes through the model in one pass, with a mask that lets each token see its own ancestors and a
position for each that is its depth; a trunk's keys and values are computed before and handed to every batch. The
log-softmax is taken in FP32. Not every model can do that: `obstacle` says what stands in the way, and `probe` and
`tolerance_nats` serve to compare with another way of scoring before this one is believed.

    for answers in score(model, plan(queries, rows_per_batch=8), queries):
        answers[0].nats, answers[0].greedy
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.token_trie import MIN_TRUNK_TOKENS, Batch, Plan, Query

_PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_MASKED_ATTENTION = {"sdpa", "eager"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MAX_LOGITS_BYTES = 1 << 29
_PROBE_CONTEXTS, _PROBE_CHOICES, _PROBE_TOKENS, _PROBE_TARGETS = 3, 2, 6, 4


class Answer(NamedTuple):
    """Sum of the targets' log-probabilities, and whether each target is the most probable token."""

    nats: float
    greedy: bool


def max_scored_positions(vocabulary_tokens: int) -> int:
    """Positions whose FP32 logits take 512 MiB."""
    return max(1, _MAX_LOGITS_BYTES // (4 * vocabulary_tokens))


def score(
    model: Any, plan: Plan, queries: Sequence[Query], *, wanted: Callable[[Batch], bool] = lambda _: True
) -> Iterator[dict[int, Answer]]:
    """Answers by query number, one dict for each batch that is `wanted`, in the plan's order.

    `model` is a transformers causal language model for which `obstacle` is None.
    """
    import torch

    held: tuple[tuple[int, ...], Any] = ((), None)
    for batch in plan.batches:
        if not wanted(batch):
            continue
        with torch.no_grad():
            if batch.trunk != held[0]:
                held = ((), None)  # given up before the next one is made
                held = (batch.trunk, _trunk_cache(model, batch.trunk))
            yield _score_batch(model, batch, held[1], queries)


def obstacle(model: Any, *, longest_tokens: int) -> str | None:
    """Why prefixes can't be shared by sequences of up to `longest_tokens`, or None; read from the model's settings."""
    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _MASKED_ATTENTION:
        return f"attention {attention} takes no mask of our own"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "the model takes no positions"
    if model.get_output_embeddings() is None:
        return "the model names no head"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (rope, *rope.values()) if isinstance(one, Mapping)}
    if kinds & _LENGTH_DEPENDENT_ROPE:
        return f"positions of type {', '.join(sorted(kinds))} depend on the text's length"
    try:
        layers = DynamicCache(config=model.config).layers
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        return f"transformers has no cache for this model ({type(error).__name__})"
    strange = {type(layer).__name__ for layer in layers} - _PLAIN_LAYERS
    if strange:
        return f"a state that can't be shared: {', '.join(sorted(strange))}"
    window = min((layer.sliding_window for layer in layers if layer.is_sliding), default=longest_tokens)
    if window < longest_tokens:
        return f"texts of up to {longest_tokens} tokens are longer than the sliding window of {window}"
    return None


# --- one batch --------------------------------------------------------------------------------------------


def _score_batch(model: Any, batch: Batch, trunk: Any, queries: Sequence[Query]) -> dict[int, Answer]:
    import torch

    logits = _logits(model, batch, trunk)
    scores = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    best = scores.argmax(dim=-1)
    start = 0
    places: list[int] = []
    targets: list[int] = []
    for row in batch.rows:
        place = {node: start + number for number, node in enumerate(row.scored_nodes)}
        start += len(place)
        for leaf in row.leaves:
            places.extend(place[node] for node in leaf.nodes)
            targets.extend(queries[leaf.query].targets)
    where = torch.tensor(places, device=logits.device)
    asked = torch.tensor(targets, device=logits.device)
    nats = scores[where, asked].tolist()
    hits = (best[where] == asked).tolist()
    answers, start = {}, 0
    for number in batch.queries:
        end = start + len(queries[number].targets)
        answers[number] = Answer(nats=math.fsum(nats[start:end]), greedy=all(hits[start:end]))
        start = end
    return answers


def _logits(model: Any, batch: Batch, trunk: Any) -> Any:
    """[scored positions, vocabulary], row by row."""
    import torch

    device = model.get_input_embeddings().weight.device
    count, width, before = len(batch.rows), batch.width, len(batch.trunk)
    ids = torch.zeros(count, width, dtype=torch.long)
    positions = torch.zeros(count, width, dtype=torch.long)
    rows: list[int] = []
    columns: list[int] = []
    for number, row in enumerate(batch.rows):
        length = len(row.tokens)
        ids[number, :length] = torch.tensor(row.tokens)
        positions[number, :length] = torch.tensor(row.depths)
        positions[number, length:] = row.depths[-1]
        rows.extend([number] * len(row.scored_nodes))
        columns.extend(row.scored_nodes)
    settings: dict[str, Any] = {"use_cache": False}
    if trunk is not None or any(row.branches for row in batch.rows):
        settings["attention_mask"] = _mask(model, batch).to(device)
        settings["position_ids"] = (positions + before).to(device)
    if trunk is not None:
        settings |= {"use_cache": True, "cache": _copies(trunk, count)}
    chosen = (torch.tensor(rows, device=device), torch.tensor(columns, device=device))
    with _head_only_at(model, chosen):
        logits = model(input_ids=ids.to(device), **settings).logits
    if logits.shape[:2] != (1, len(rows)):
        raise ValueError("the model's head isn't called as a module: it can't be limited to some positions")
    return logits[0]


def _mask(model: Any, batch: Batch) -> Any:
    """[rows, 1, width, trunk + width]: the whole trunk, and a node's own ancestors; padding goes on with the last path.

    Padding that saw nothing but itself would be a text's first token, whose activations are the largest of all:
    quantizers that scale activations by the batch's maximum would feel it.
    """
    import torch

    width = batch.width
    ends = torch.full((len(batch.rows), width), width)
    for number, row in enumerate(batch.rows):
        length = len(row.tokens)
        own = torch.tensor(row.ends)
        ends[number, :length] = torch.where(own == length, width, own)
    index = torch.arange(width)
    tree = (index[None, :] <= index[:, None]) & (index[None, :, None] < ends[:, None, :])
    trunk = torch.ones(len(batch.rows), width, len(batch.trunk), dtype=torch.bool)
    seen = torch.cat([trunk, tree], dim=-1).unsqueeze(1)
    if model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
        return seen
    dtype = model.dtype
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _trunk_cache(model: Any, tokens: Sequence[int]) -> Any:
    """Keys and values of a text that many rows begin with; None where there is none."""
    import torch
    from transformers import DynamicCache

    if not tokens:
        return None
    device = model.get_input_embeddings().weight.device
    cache = DynamicCache()  # plain layers: a sliding window is never exceeded here, and masks are our own
    first = torch.zeros(1, dtype=torch.long, device=device)
    with _head_only_at(
        model, (first, first)
    ):  # nobody asks for a trunk's logits, but a head may refuse nothing
        model(input_ids=torch.tensor([list(tokens)], device=device), use_cache=True, cache=cache)
    return cache


def _copies(trunk: Any, count: int) -> Any:
    """A cache of `count` sequences that all begin with the trunk, to be grown; the trunk itself stays as it is.

    The repeated keys and values are views: the layer's own first `update` makes the one copy that is needed.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache()
    for layer in trunk.layers:
        repeated = DynamicLayer()
        repeated.lazy_initialization(layer.keys, layer.values)
        repeated.keys = layer.keys.expand(count, -1, -1, -1)
        repeated.values = layer.values.expand(count, -1, -1, -1)
        cache.layers.append(repeated)
    return cache


@contextlib.contextmanager
def _head_only_at(model: Any, chosen: tuple[Any, Any]) -> Iterator[None]:
    """The head sees hidden states at (rows, columns) only, as one row; what a model does to its logits stays."""

    def choose(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0][chosen].unsqueeze(0), *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


# --- is it the same? --------------------------------------------------------------------------------------


def probe(queries: Sequence[Query]) -> list[Query]:
    """A few of the requests cut short, with a common beginning, so that every part of the way is walked in a blink."""
    by_context: dict[tuple[int, ...], list[Query]] = {}
    for query in queries:
        by_context.setdefault(query.context, []).append(query)
    contexts = list(by_context)
    few = [
        contexts[place * (len(contexts) - 1) // max(1, _PROBE_CONTEXTS - 1)]
        for place in range(_PROBE_CONTEXTS)
    ]
    head = (contexts[0] * MIN_TRUNK_TOKENS)[:MIN_TRUNK_TOKENS]
    found: dict[Query, None] = {}
    for number, context in enumerate(few):
        tail = (*context[-_PROBE_TOKENS:], *contexts[0][:number])  # different, whatever the texts are
        for query in by_context[context][:_PROBE_CHOICES]:
            targets = query.targets[:_PROBE_TARGETS]
            found[Query(tokens=(*head, *tail, *targets[:-1]), targets=targets)] = None
    return list(found)


def tolerance_nats(model: Any, *, targets: int, noise_nats: float) -> float:
    """How far two right ways may differ in the sum over `targets` tokens.

    1e-4, or what rounding in the model's type makes of logits of a usual size (16 units in the last place a token,
    adding up like a random walk), or five times what the reference differs from itself in another batch.
    """
    import torch

    rounding = 16 * torch.finfo(model.dtype).eps * math.sqrt(targets)
    return max(1e-4, rounding, 5 * noise_nats)


def closest_call(model: Any, query: Query) -> float:
    """Nats between a target and its best rival, where they are closest: below rounding the greedy flag is chance."""
    import torch

    device = model.get_input_embeddings().weight.device
    targets = torch.tensor(query.targets, device=device)[:, None]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([query.tokens], device=device)).logits[0, query.first_scored :]
    own = logits.float().gather(1, targets)
    rivals = logits.float().scatter(1, targets, -math.inf).max(dim=1, keepdim=True).values
    return float((own - rivals).abs().min())


def largest_difference(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """In nats; not a number on both sides is no difference, on one side an infinite one."""
    return max((_difference(a.nats, b.nats) for a, b in zip(one, other, strict=True)), default=0.0)


def _difference(one: float, other: float) -> float:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return 0.0 if math.isnan(one) == math.isnan(other) and (math.isnan(one) or one == other) else math.inf
