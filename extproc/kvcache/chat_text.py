"""A request's body -> the text that the engine will tokenise, by the model's chat template.

Rules of this file, which are vLLM's (``vllm/renderers``, version 0.32; Hugging Face's ``apply_chat_template``
below that):

- messages become role and content; content is a string (text parts joined by newlines), or a list of text
  parts where the template walks over a message's content. Assistants' tool calls keep their arguments as
  objects; ``reasoning`` goes along, under both its names; tools are name, description and parameters, absent
  ones null. ``developer`` is ``system`` for templates that do not know it;
- whoever uses what we do not follow (media, documents, a template or a last message of their own, other APIs)
  gets no text: None, and the caller does without;
- templates come with a model and are not trusted: they run in Jinja's immutable sandbox, with ranges bounded,
  and stop at a deadline that is looked at whenever they call, look up or write something.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from extproc.api.request import Api

_decode = msgspec.json.Decoder().decode
_TEXTS = frozenset({"text", "input_text", "output_text"})
_UNFOLLOWED = (
    "documents",
    "chat_template",
    "continue_final_message",
    "truncate_prompt_tokens",
    "media_io_kwargs",
)
_END: ContextVar[float] = ContextVar("end", default=float("inf"))
"""When the rendering that runs in this thread must stop."""
_BILLING = "x-anthropic-billing-header"
"""A line that Claude Code puts into system prompts and vLLM takes out, because it changes every time."""


class TemplateError(Exception):
    """The template cannot be used, refused the conversation, or took too long."""


@dataclass(slots=True, frozen=True)
class Text:
    """What will be tokenised."""

    text: str
    special: bool
    """The tokenizer adds its own tokens around (BOS): prompts do, chats have them from their template."""


class ChatTemplate:
    """One model's template, compiled. ``clock`` gives seconds, ``today`` the date that some templates print;
    ``limit_s`` bounds one rendering. For any number of threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float],
        today: Callable[[], datetime.datetime],
        limit_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._special = dict(special_tokens)
        environment = _Sandbox(clock)
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        try:
            tree = environment.parse(source)
            self._names = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"line {getattr(error, 'lineno', '?')}: {error}") from error
        self._environment = environment
        self.walks_content = _walks_content(tree)
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, extra: Mapping[str, Any]
    ) -> str:
        """The conversation as text. Raises TemplateError."""
        if not self._knows_developer and any(one["role"] == "developer" for one in messages):
            messages = _as_system(messages)
        named = {name: value for name, value in extra.items() if name in self._names}
        end = self._clock() + self._limit_s
        try:
            parts: list[str] = []
            with self._environment.until(end):
                for part in self._template.generate(
                    **{**self._special, **named}, messages=messages, tools=tools, documents=None
                ):
                    parts.append(part)
                    if self._clock() > end:
                        raise TemplateError("took too long")
            return "".join(parts)
        except TemplateError:
            raise
        except Exception as error:
            # A template runs any expression on clients' data: whatever it raises, this request has no text.
            raise TemplateError(type(error).__name__) from error


def text_of(api: Api, body: bytes, template: ChatTemplate | None) -> Text | None:
    """The text of a body, or None where we do not follow what the engine does with it. Raises TemplateError."""
    if api is Api.COMPLETIONS:
        sent = _object(body)
        prompt = sent.get("prompt")
        if not isinstance(prompt, str) or sent.get("truncate_prompt_tokens") is not None:
            return None
        return Text(prompt, sent.get("add_special_tokens") is not False)
    if api is not Api.CHAT or template is None:
        return None
    sent = _object(body)
    if any(sent.get(name) for name in _UNFOLLOWED):
        return None
    messages = _messages(sent.get("messages"), template.walks_content)
    if messages is None:
        return None
    extra: dict[str, Any] = dict(sent.get("chat_template_kwargs") or {})
    if any(
        name in extra for name in ("chat_template", "tokenize", "continue_final_message", "messages", "tools")
    ):
        return None
    effort = sent.get("reasoning_effort")
    if effort is not None:
        extra.setdefault("enable_thinking", effort != "none")
        extra.setdefault("reasoning_effort", effort)
    extra.setdefault("add_generation_prompt", sent.get("add_generation_prompt", True))
    rendered = template.render(messages, _tools(sent.get("tools")), extra)
    return Text(rendered, sent.get("add_special_tokens") is True)


def _object(body: bytes) -> dict[str, Any]:
    try:
        sent = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return sent if isinstance(sent, dict) else {}


def _messages(sent: Any, walks: bool) -> list[dict[str, Any]] | None:
    if not isinstance(sent, list) or not sent:
        return None
    messages = []
    for one in sent:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            return None
        role = one["role"]
        texts = _texts(one.get("content"), role)
        if texts is None:
            return None
        content: Any = "\n".join(texts)
        if walks and role != "tool":
            content = [{"type": "text", "text": text} for text in texts]
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            if not _add_calls(message, one.get("tool_calls")):
                return None
            if (thought := one.get("reasoning")) is not None:
                message["reasoning"] = message["reasoning_content"] = thought
        elif role == "tool" and "tool_call_id" in one:
            message["tool_call_id"] = one["tool_call_id"]
        elif role == "developer":
            message["tools"] = one.get("tools")
        if isinstance(one.get("name"), str):
            message["name"] = one["name"]
        messages.append(message)
    return messages


def _texts(content: Any, role: str) -> list[str] | None:
    """Text parts; None when there are others."""
    if content is None:
        return []
    texts = []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else [None]:
        if isinstance(part, str):
            text: Any = part
        elif isinstance(part, dict) and part.get("type", "text") in _TEXTS:
            text = part.get("text")
        else:
            return None
        if not isinstance(text, str):
            return None
        if role == "system" and text.startswith(_BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
        texts.append(text)
    return texts


def _add_calls(message: dict[str, Any], calls: Any) -> bool:
    if calls is None or calls == []:
        return True
    if not isinstance(calls, list):
        return False
    kept = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            return False
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = _decode(arguments) if arguments else {}
            except msgspec.DecodeError:
                arguments = {}
        kept.append(
            {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
        )
    message["tool_calls"] = kept
    return True


def _tools(tools: Any) -> list[Any] | None:
    if not isinstance(tools, list) or not tools:
        return None
    kept = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise TemplateError("a tool without a function")
        told = {name: function.get(name) for name in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            told["strict"] = function["strict"]
        kept.append({"type": tool.get("type", "function"), "function": told})
    return kept


def _as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system ones, and all of these in one at the front if they are not there already."""
    renamed = []
    for one in messages:
        message = dict(one)
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
        renamed.append(message)
    system = [one for one in renamed if one["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    contents = [
        one["content"]
        if isinstance(one["content"], str)
        else "\n".join(part["text"] for part in one["content"])
        for one in system
    ]
    merged = {"role": "system", "content": "\n\n".join(content for content in contents if content)}
    return [merged, *(one for one in renamed if one["role"] != "system")]


def _walks_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content: then content is a list of parts, else a string."""
    lists = {"messages"} | _assigned(tree, {"messages"}, None)
    loops = list(tree.find_all(jinja2.nodes.For))
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, jinja2.nodes.Name) and _reads(loop.iter, lists, None)
    }
    in_macros = {
        id(loop) for macro in tree.find_all(jinja2.nodes.Macro) for loop in macro.find_all(jinja2.nodes.For)
    }
    for loop in loops:
        if _reads(loop.iter, items, "content"):
            return True
        if (
            id(loop) not in in_macros
            and isinstance(loop.iter, jinja2.nodes.Name)
            and loop.iter.name == "content"
        ):
            return True
    for macro in tree.find_all(jinja2.nodes.Macro):
        given: set[str] = set()
        for call in tree.find_all(jinja2.nodes.Call):
            if isinstance(call.node, jinja2.nodes.Name) and call.node.name == macro.name:
                given |= {
                    target.name
                    for argument, target in zip(call.args, macro.args, strict=False)
                    if _reads(argument, items, "content")
                }
                given |= {keyword.key for keyword in call.kwargs if _reads(keyword.value, items, "content")}
        for loop in macro.find_all(jinja2.nodes.For):
            if isinstance(loop.iter, jinja2.nodes.Name) and loop.iter.name in given:
                return True
    return False


def _assigned(tree: jinja2.nodes.Template, names: set[str], key: str | None) -> set[str]:
    """Names that stand for one of ``names``, or for a part of it."""
    found: set[str] = set()
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(jinja2.nodes.Assign)
            if isinstance(assign.target, jinja2.nodes.Name) and _reads(assign.node, names | found, key)
        }
        if more <= found:
            return found
        found |= more


def _reads(node: jinja2.nodes.Node, names: set[str], key: str | None) -> bool:
    """Whether an expression is one of the names (or their ``key``), filtered or sliced."""
    while isinstance(node, (jinja2.nodes.Filter, jinja2.nodes.Test)) and node.node is not None:
        node = node.node
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        return _reads(node.node, names, key)
    if key is None:
        return isinstance(node, jinja2.nodes.Name) and node.name in names
    if isinstance(node, jinja2.nodes.Getitem):
        same = isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == key
        return same and _reads(node.node, names, None)
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == key and _reads(node.node, names, None)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks assistants' text for training; for us it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's environment, with a deadline."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self._clock = clock
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse

    @contextlib.contextmanager
    def until(self, end: float) -> Iterator[None]:
        """What runs within stops at ``end``."""
        token = _END.set(end)
        try:
            yield
        finally:
            _END.reset(token)

    def check(self) -> None:
        """Raise TemplateError after the deadline."""
        if self._clock() > _END.get():
            raise TemplateError("took too long")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return super().call(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> Iterator[str]:
    raise TemplateError("refused by the template")
