"""A causal language model as trunk and head, so that logits can be made for a few positions at a time.

The trunk's hidden states take hidden × 4 bytes a token, the logits vocabulary × 4: a hundred times as much for a small
model with a large vocabulary. The head is applied by the model's own `forward`, in which the trunk is replaced by what
it had already made, so that scaling, capping and tied weights are the model's own.

    made = SplitModel(model).run(ids)
    made.logits(0, start=256, stop=288)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class SplitModel:
    """`model` is a loaded transformers model; it is left as it was between calls."""

    def __init__(self, model: Any) -> None:
        """Runs one token, to see whether the head takes what the trunk makes, and how wide it is."""
        import torch

        self.device = model.device
        self.embedding_rows = int(model.get_input_embeddings().weight.shape[0])
        self._model, self._trunk = model, model.base_model
        self._output: type[Any] | None = None
        with torch.no_grad():
            whole = model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False).logits
        self.vocabulary_tokens = int(whole.shape[-1])
        self.is_split = self._trunk is not model and self._passes_on()

    def run(self, ids: torch.Tensor) -> MadeStates:
        """The trunk over sequences [sequences, tokens] of one length; a model that isn't split makes all logits."""
        if not self.is_split:
            return MadeStates(self, self._model(ids, use_cache=False).logits)
        return MadeStates(self, self._trunk(ids, use_cache=False).last_hidden_state)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocabulary] of the trunk's states [tokens, hidden]."""
        with self._instead_of_trunk(states[None]):
            logits: torch.Tensor = self._model(self._no_tokens(len(states)), use_cache=False).logits
        return logits[0]

    def _passes_on(self) -> bool:
        """Whether `forward` calls the trunk as one, once: OPT's, for one, calls a part of it instead."""
        import torch

        with torch.no_grad():
            made = self._trunk(self._no_tokens(1), use_cache=False)
            self._output = type(made)
            with self._instead_of_trunk(made.last_hidden_state) as calls:
                self._model(self._no_tokens(1), use_cache=False)
        return len(calls) == 1

    def _no_tokens(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros((1, count), dtype=torch.long, device=self.device)

    @contextmanager
    def _instead_of_trunk(self, states: torch.Tensor) -> Iterator[list[int]]:
        assert self._output is not None, "known since the first token"
        output = self._output(last_hidden_state=states)
        calls: list[int] = []

        def made_before(*_: Any, **__: Any) -> Any:
            calls.append(1)
            return output

        held = vars(self._trunk).get("forward")  # what accelerate puts there on models it has placed
        self._trunk.forward = made_before
        try:
            yield calls
        finally:
            if held is None:
                del self._trunk.forward
            else:
                self._trunk.forward = held


class MadeStates:
    """What the trunk made of a batch."""

    def __init__(self, parts: SplitModel, states: torch.Tensor) -> None:
        self._parts, self._states = parts, states

    def logits(self, sequence: int, *, start: int, stop: int) -> torch.Tensor:
        """[stop − start, vocabulary] of the positions from `start` to before `stop`."""
        states = self._states[sequence, start:stop]
        return self._parts.head(states) if self._parts.is_split else states
