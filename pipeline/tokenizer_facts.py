"""A checkpoint's tokenizer and the facts both sides of a comparison must share.

tokenizer = load_tokenizer(folder, chat_template=False)
tokenizer_hash(tokenizer), chat_template_hash(tokenizer), adds_bos(tokenizer)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.errors import PrerequisiteError


def load_tokenizer(folder: Path, *, chat_template: bool) -> Any:
    """The tokenizer of a local folder; raises PrerequisiteError when a template is asked of one without."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if chat_template and not _chat_template(tokenizer):
        raise PrerequisiteError(
            f"quality.apply_chat_template: the tokenizer in {folder} has no chat template; "
            "set it to false for a base model"
        )
    return tokenizer


def _chat_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return template if template is None or isinstance(template, str) else to_json(template)


def adds_bos(tokenizer: Any) -> bool:
    """Whether plain text is encoded with a beginning-of-sequence token in front."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what the tokenizer does, not of its files, which every save writes a little differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else to_json(sorted(tokenizer.get_vocab().items()))
    return text_hash(rules + to_json(tokenizer.special_tokens_map))


def chat_template_hash(tokenizer: Any) -> str | None:
    """Hash of the chat template, applied or not; None when there is none."""
    template = _chat_template(tokenizer)
    return None if template is None else text_hash(template)


def text_hash(text: str) -> str:
    """SHA-256 (hex) of text that may hold lone surrogates, as cut-up bytes do."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def to_json(data: Any) -> str:
    """JSON for hashing: sorted keys, and text in place of what JSON can't hold."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)
