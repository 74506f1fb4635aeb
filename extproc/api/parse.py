"""A request's head and body -> :class:`InferenceRequest`: the one reading of a client's body.

Rules of this file:

- it reads what routing needs and judges nothing else: the engine is the judge of what it serves;
- it refuses only a JSON body of a known API that is no JSON (or no object): nothing can be routed from that,
  and no engine would take it. Whatever ``json.loads`` takes is routed (see ``tolerant.py``);
- no message it makes quotes the body.

CPU-bound, roughly 1 ms a MB, and a parser holds the interpreter while it runs: the edge gives large bodies to
a thread.
"""

from __future__ import annotations

import contextlib
import json
import re

import msgspec

from extproc.api import fields, prompt, tolerant
from extproc.api.fields import Body
from extproc.api.multipart import form_fields
from extproc.api.paths import classify
from extproc.api.request import Api, Dialect, InferenceRequest, Prompt, RequestHead
from extproc.api.splice import find_model, model_span
from extproc.routing.rejection import Rejection, bad_request

_body = msgspec.json.Decoder(Body)
_string = msgspec.json.Decoder(str)
_KEYS = Body.__struct_fields__
_FORM = frozenset({"model", "stream", "user"})
_NO_PROMPT_APIS = frozenset({Api.OTHER, Api.MODELS, Api.HEALTH})
_OBJECT = re.compile(rb"\s*+\{")
_MOST_COMMAS = 2_000_000
"""A body with more has a prompt of no sane shape (a million token ids have a million): it is not read, since
a list of small things takes a hundred times its size in memory.
"""


class BadRequest(Exception):
    """Nothing can be routed from this request; ``rejection`` says why in the gateway's terms."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


def parse(
    head: RequestHead,
    body: bytes | None,
    plain: bytes | None = None,
    *,
    partial: bool = False,
    brief: bool = False,
) -> InferenceRequest:
    """Read one request. ``body`` is as sent, None or empty when there is none; ``plain`` is its decoded form
    where it came compressed. A compressed body without ``plain`` is read as it came, since engines that know
    no encodings do so; if that is no JSON the request is routed on its head. ``partial``: more of the body is
    to come, unseen; the model key must do, and it cannot be replaced.
    ``brief``: leave the prompt unread, only its size counts (for a gateway that is late).

    Raises :class:`BadRequest` and nothing else.
    """
    api, dialect = classify(head.method, head.path)
    if "anthropic-version" in head.headers and api in _NO_PROMPT_APIS:
        dialect = Dialect.ANTHROPIC
    request = InferenceRequest(head, api, dialect, body_size=len(body) if body else 0, plain=plain)
    request.session = fields.bounded(head.headers.get("x-session-id"))
    readable = plain if plain is not None else body
    if not readable or api in (Api.MODELS, Api.HEALTH):
        return request
    content_type = head.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "multipart/form-data":
        _read_form(request, readable, content_type)
    elif (
        _is_json(media_type)
        or (api not in _NO_PROMPT_APIS and api is not Api.AUDIO)
        or _OBJECT.match(readable)  # whatever it is called: engines do not all look at the content type
    ):
        try:
            _read_json(request, readable, brief)
        except ValueError as error:
            if partial:
                _read_model_only(request, readable)
                request.model_span = None
                return request
            if plain is None and _is_encoded(head):
                request.unread = True
                return request
            known = api not in _NO_PROMPT_APIS
            if known and (_is_json(media_type) or not media_type):
                raise BadRequest(_not_json(error)) from None
    return request


def _is_encoded(head: RequestHead) -> bool:
    return head.headers.get("content-encoding", "").strip().lower() not in ("", "identity")


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def _not_json(error: ValueError) -> Rejection:
    where = ""
    if isinstance(error, json.JSONDecodeError):
        where = f" ({error.msg}: line {error.lineno} column {error.colno})"
    return bad_request(f"The request body is not a valid JSON object{where}.", reason="bad_json")


def _read_form(request: InferenceRequest, body: bytes, content_type: str) -> None:
    """An upload's ``model``. It has no span: a form value cannot be spliced as a JSON string."""
    form, whole = form_fields(body, content_type, _FORM)
    request.model = form.get("model") or None
    request.unread = not whole or request.model is None
    request.stream = form.get("stream", "").lower() in ("true", "1")
    request.user = fields.bounded(form.get("user"))


def _read_json(request: InferenceRequest, body: bytes, brief: bool) -> None:
    """Fill ``request``; ValueError when the body is no JSON object even for a tolerant reader."""
    try:
        try:
            _read_strict(request, body, brief)
        except msgspec.DecodeError:
            _read_tolerant(request, body)
    except RecursionError:
        _read_model_only(request, body)


def _read_strict(request: InferenceRequest, body: bytes, brief: bool = False) -> None:
    keys = _body.decode(body)
    _fill(request, keys)
    if request.api not in _NO_PROMPT_APIS:
        request.prompt = (
            Prompt(size=len(body)) if brief or _is_shredded(body) else prompt.build(request.api, keys)
        )
    if request.model is not None:
        request.model_span = model_span(body, bytes(keys.model))


def _read_tolerant(request: InferenceRequest, body: bytes) -> None:
    patched = tolerant.patch(body)
    if patched != body:
        with contextlib.suppress(msgspec.DecodeError):
            _read_strict(request, patched)
            return
    if len(body) > tolerant.LARGEST or _is_shredded(body):
        _read_model_only(request, body)
        return
    keys = _body.decode(tolerant.clean(body, _KEYS))
    _fill(request, keys)
    if request.api not in _NO_PROMPT_APIS:
        request.prompt = prompt.build(request.api, keys)
    if request.model is not None and tolerant.is_ascii_superset(body):
        request.model_span = find_model(body)


def _is_shredded(body: bytes) -> bool:
    return len(body) > _MOST_COMMAS and body.count(b",") > _MOST_COMMAS


def _read_model_only(request: InferenceRequest, body: bytes) -> None:
    """For bodies that cannot be parsed as a whole: the model key alone."""
    request.prompt = Prompt(size=len(body))
    request.model = request.model_span = None
    request.unread = True
    span = find_model(body)
    if span is None:
        return
    try:
        request.model = _string.decode(body[span[0] : span[1]]) or None
    except msgspec.DecodeError:
        return
    request.model_span = span if request.model else None
    request.unread = request.model is None


def _fill(request: InferenceRequest, body: Body) -> None:
    request.model = fields.text(body.model) or None
    request.stream = fields.flag(body.stream)
    request.max_tokens = None
    for raw in (body.max_completion_tokens, body.max_tokens, body.max_output_tokens):
        if raw is not fields.ABSENT and (count := fields.count(raw)) is not None:
            request.max_tokens = count
            break
    request.session = (
        request.session
        or fields.label(body.session_id)
        or fields.label(body.prompt_cache_key)
        or fields.label(body.conversation)
        or fields.label(fields.member(body.conversation, "id"))
    )
    request.user = (
        fields.label(body.user)
        or fields.label(body.safety_identifier)
        or fields.label(fields.member(body.metadata, "user_id"))
    )
    request.cache_salt = fields.label(body.cache_salt) or ""
