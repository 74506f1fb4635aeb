"""A model's tokenizer and chat template, read from its folder as Hugging Face lays it out.

``tokenizer.json`` is needed; ``chat_template.jinja`` or ``chat_template`` in ``tokenizer_config.json`` is needed for
chats; special tokens come from ``tokenizer_config.json`` and ``special_tokens_map.json``.
"""

from __future__ import annotations

import datetime
import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.api.request import Api
from extproc.kvcache.token_memo import TokenMemo

if TYPE_CHECKING:
    from extproc.kvcache.chat_text import ChatTemplate

MAX_CHARS = 4_000_000
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """The folder holds no tokenizer that can be used; the text says why."""


class ModelTokenizer:
    """Prompt bodies -> the engine's tokens. For several threads."""

    def __init__(
        self, memo: TokenMemo, around: tuple[array[int], array[int]], template: ChatTemplate | None
    ) -> None:
        self.memo = memo
        self.template = template
        self._around = around

    def tokens(self, api: Api, body: bytes) -> bytes | None:
        """Packed tokens of a request's prompt; None where its prompt is not one we can follow.

        Raises:
            TemplateError: the template refuses it.
        """
        # Not at the head of this file: what it needs is an extra, and extproc must start without.
        from extproc.kvcache.chat_text import text_of

        text = text_of(api, body, self.template)
        if text is None or len(text.text) > MAX_CHARS:
            return None
        tokens = self.memo.encode(text.text)
        if text.special:
            before, after = self._around
            tokens = before + tokens + after
        return tokens.tobytes()


def load(folder: Path, *, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> ModelTokenizer:
    """Read a folder; takes a second for a big vocabulary.

    Raises:
        TokenizerError: it cannot be used.
    """
    try:
        from tokenizers import Tokenizer

        from extproc.kvcache.chat_text import ChatTemplate, TemplateError
    except ImportError:
        raise TokenizerError("needs `pip install extproc[tokenizers]`") from None
    try:
        source = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        own = Tokenizer.from_str(json.dumps(source))
        own.no_truncation()
        own.no_padding()
        # The post-processor only adds special tokens around a text, and trims places that we need whole.
        plain = Tokenizer.from_str(json.dumps(source | {"post_processor": None}))
        plain.no_truncation()
        plain.no_padding()
    except OSError as error:
        raise TokenizerError(f"{folder / 'tokenizer.json'}: {error.strerror}") from None
    except Exception as error:
        raise TokenizerError(f"{folder / 'tokenizer.json'}: {error}") from None
    config = _json(folder / "tokenizer_config.json")
    template = None
    text = _template(folder, config)
    if text is not None:
        special = {**_json(folder / "special_tokens_map.json"), **config}
        named = {name: _token(special[name]) for name in _SPECIAL if _token(special.get(name))}
        try:
            template = ChatTemplate(text, named, clock=clock, today=datetime.datetime.now)
        except TemplateError as error:
            raise TokenizerError(f"chat template of {folder}: {error}") from None
    memo = TokenMemo(
        lambda text: plain.encode(text, add_special_tokens=False),
        cuts=_cuts_words(source),
        max_tokens=max_tokens,
    )
    return ModelTokenizer(memo, _around(own), template)


def _around(tokenizer: Any) -> tuple[array[int], array[int]]:
    """Special tokens that are put before and after a prompt."""
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return array("I", whole[:start]), array("I", whole[start + len(inner) :])
    return array("I"), array("I")


def _cuts_words(source: dict[str, Any]) -> bool:
    """Whether a text's tokens do not depend on what is before the word they are in (byte-level BPE)."""
    steps = _steps(source.get("pre_tokenizer"), "pretokenizers")
    normal = _steps(source.get("normalizer"), "normalizers")
    return (
        (source.get("model") or {}).get("type") == "BPE"
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(step.get("add_prefix_space") for step in steps)
        and all(step.get("type") == "NFC" for step in normal)
    )


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step.get(inner) or []) if step.get("type") == "Sequence" else [step]


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except OSError:
        pass
    found = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(value: Any) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from None
    return found if isinstance(found, dict) else {}
