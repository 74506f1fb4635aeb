"""What is read of a request, what is let through unread, and the little that is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api import parse as parsing
from extproc.api import tolerant
from extproc.api.parse import BadRequest, parse
from extproc.api.request import Api, Dialect, InferenceRequest, RequestHead
from extproc.api.splice import splice

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/unknown",
]


def head(path: str = CHAT, headers: Mapping[str, str] = JSON, method: str = "POST") -> RequestHead:
    return RequestHead("id-1", method, path, "", headers)


def read(body: object, path: str = CHAT, headers: Mapping[str, str] = JSON) -> InferenceRequest:
    return parse(head(path, headers), body if isinstance(body, bytes) else json.dumps(body).encode())


def refused(body: bytes, path: str = CHAT, headers: Mapping[str, str] = JSON) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(head(path, headers), body)
    return caught.value


def test_what_routing_needs_is_read() -> None:
    request = read({"model": "a/b:c", "stream": True, "max_tokens": 7, "user": "u", "cache_salt": "s"})
    assert (request.model, request.stream, request.max_tokens) == ("a/b:c", True, 7)
    assert (request.user, request.cache_salt, request.id) == ("u", "s", "id-1")
    assert (request.api, request.dialect) == (Api.CHAT, Dialect.OPENAI)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_routed_by_the_model_of_its_json(path: str) -> None:
    assert read({"model": "m"}, path).model == "m"


@pytest.mark.parametrize("model", [None, 5, [], {}, "", True])
def test_a_model_that_is_no_name_leaves_the_choice_to_the_default_pool(model: object) -> None:
    request = read({"model": model})
    assert request.model is None
    assert request.model_span is None


def test_no_model_is_no_error() -> None:
    assert read({}).model is None


@pytest.mark.parametrize("body", [None, b""])
def test_no_body_is_no_error(body: bytes | None) -> None:
    request = parse(head(), body)
    assert (request.model, request.body_size) == (None, 0)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": "10"}, 10),
        ({"max_tokens": 10.0}, 10),
        ({"max_tokens": "ten"}, None),
        ({"max_tokens": 1.5}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": [5]}, None),
        ({"max_tokens": 10**30}, None),
        ({}, None),
    ],
)
def test_the_clients_bound_on_output(fields: dict[str, object], bound: int | None) -> None:
    assert read(fields).max_tokens == bound


@pytest.mark.parametrize(
    ("value", "stream"),
    [(True, True), (1, True), ("true", True), (False, False), (None, False), ("maybe", False), ([], False)],
)
def test_stream_as_lax_as_the_engines(value: object, stream: bool) -> None:
    assert read({"stream": value}).stream is stream


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_id": "a", "prompt_cache_key": "b", "conversation": "c"}, "a"),
        ({"prompt_cache_key": "b", "conversation": "c"}, "b"),
        ({"conversation": "c"}, "c"),
        ({"conversation": {"id": "d"}}, "d"),
        ({"conversation": {"id": 4}}, None),
        ({"session_id": 4, "prompt_cache_key": "b"}, "b"),
        ({"session_id": ""}, None),
        ({"user": "u"}, None),
    ],
)
def test_the_session_of_the_body(fields: dict[str, object], session: str | None) -> None:
    assert read(fields).session == session


def test_the_session_header_comes_first() -> None:
    assert read({"session_id": "body"}, headers={**JSON, "x-session-id": "head"}).session == "head"
    assert parse(head(headers={"x-session-id": "head"}), None).session == "head"


def test_long_names_become_digests() -> None:
    request = read({"session_id": "s" * 100_000, "user": "u" * 100_000})
    assert request.session is not None
    assert request.session.startswith("xxh3:")
    assert len(request.session) < 64
    assert request.user is not None
    assert len(request.user) < 64


def test_the_user_is_also_called_safety_identifier_or_metadata_user_id() -> None:
    assert read({"safety_identifier": "s"}).user == "s"
    assert read({"metadata": {"user_id": "m"}}, "/v1/messages").user == "m"
    assert read({"metadata": "text"}).user is None


def test_only_top_level_keys_count() -> None:
    text = '","user":"x","model":"y","session_id":"z"'
    request = read({"messages": [{"role": "user", "content": text, "user": "w"}], "extra": {"user": "v"}})
    assert (request.user, request.model, request.session) == (None, None, None)


@pytest.mark.parametrize(
    "body", [b"{", b"nope", b'{"model":"m"} x', b'{"model":}', b"[]", b'"text"', b"7", b"null"]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    rejection = refused(body).rejection
    assert (rejection.status, rejection.code, rejection.reason) == (400, "invalid_request_error", "bad_json")


def test_the_refusal_says_where_and_quotes_nothing() -> None:
    error = refused(b'{"model":"m",\n "prompt":"top secret" "x"}')
    assert "line 2 column 24" in error.rejection.message
    assert "secret" not in error.rejection.message
    assert "secret" not in str(error)
    assert error.__cause__ is None


@pytest.mark.parametrize("path", ["/unknown", "/generate"])
def test_an_unknown_path_is_never_refused(path: str) -> None:
    assert read(b"{", path).model is None


@pytest.mark.parametrize("media_type", ["application/octet-stream", "application/x-www-form-urlencoded"])
def test_another_content_type_is_read_as_json_but_not_judged(media_type: str) -> None:
    headers = {"content-type": media_type}
    assert read({"model": "m"}, headers=headers).model == "m"
    assert read(b"\x00\x01", headers=headers).model is None


def test_without_a_content_type_json_is_expected() -> None:
    assert read({"model": "m"}, headers={}).model == "m"
    refused(b"{", headers={})


@pytest.mark.parametrize(
    "rest",
    [
        b'"temperature":NaN',
        b'"top_p":-Infinity,"x":Infinity',
        b'"x":1e999',
        b'"x":"\\ud800"',
        b'"\\udfff":1',
        b'"x":"\\ud83d\\ude00\\ud83d"',
        b'"x":"\\\\ud83d\\ude00"',
        b'"x":"\xed\xa0\x80"',
        b'"x":"\xff\xfe"',
        b'"x":' + b"9" * 4000,
        b'"x":"\\u0000"',
    ],
)
def test_what_python_engines_accept_is_routed(rest: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + rest + b"}"
    request = read(body)
    assert request.model == "m"
    assert request.prompt.pieces == (b"\xffuser\xfehi",)


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_other_unicode_encodings_are_routed(coding: str) -> None:
    assert read('{"model":"mö"}'.encode(coding)).model == "mö"


def test_a_model_with_a_lone_surrogate_can_still_be_printed() -> None:
    model = read(b'{"model":"m\\ud800"}').model
    assert model is not None
    assert model.encode() == b"m\xef\xbf\xbd"


def test_a_body_too_deep_to_parse_is_routed_by_its_model() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert read(b'{"x":' + deep + b',"model":"m"}').model == "m"
    assert read(b'{"messages":[{"content":' + deep + b'}],"model":"m"}').model == "m"
    assert read(b"[" * 100_000).model is None


@pytest.mark.parametrize("body", [b'{"model":"m","x":"\\ud800"}', b'\xef\xbb\xbf{"model":"m"}'])
def test_marks_and_surrogates_need_no_slow_reading(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerant, "clean", None)
    assert read(body).model == "m"


def test_surrogates_without_number_are_left_to_the_slow_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model":"m","x":"' + b"\\ud800" * 5 + b'"}'
    assert b"ufffd" in tolerant.patch(body)
    monkeypatch.setattr(tolerant, "_MOST_LONE", 4)
    assert tolerant.patch(body) == body
    assert read(body).model == "m"


def test_a_huge_odd_body_is_routed_by_its_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerant, "LARGEST", 40)
    request = read(b'{"prompt":"hi","x":NaN,"y":"%s","model":"m"}' % (b"y" * 40), "/v1/completions")
    assert (request.model, request.prompt.pieces) == ("m", ())
    assert request.prompt.size == request.body_size


def test_a_prompt_shredded_into_millions_of_pieces_is_sized_but_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parsing, "_MOST_COMMAS", 20)
    for extra in ({}, {"x": float("nan")}):
        request = read({"model": "m", "stream": True, "messages": [{}] * 30, **extra})
        assert (request.model, request.prompt.pieces) == ("m", ())
        assert request.prompt.size == request.body_size


def test_a_compressed_body_is_read_from_its_plain_form() -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    plain = b'{"model":"m"}'
    request = parse(head(headers=headers), b"\x1f\x8b....", plain)
    assert (request.model, request.plain, request.body_size) == ("m", plain, 6)
    assert request.model_span == (9, 12)


def test_a_compressed_body_that_could_not_be_decoded_is_not_judged() -> None:
    request = parse(head(headers={**JSON, "content-encoding": "lzma"}), b"\x00\x01")
    assert (request.model, request.plain, request.unread) == (None, None, True)
    assert read({"model": "m"}, headers={**JSON, "content-encoding": "identity"}).model == "m"


def test_a_body_that_only_says_it_is_compressed_is_read_as_engines_read_it() -> None:
    request = read(b' {"model":"m"}', headers={**JSON, "content-encoding": "gzip"})
    assert (request.model, request.unread, request.model_span) == ("m", False, (10, 13))


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/v1/chat/completion%73", "/unknown"])
def test_json_is_read_whatever_the_content_type_says(path: str, kind: str) -> None:
    assert read(b'\r\n {"model":"m"}', path, {"content-type": kind}).model == "m"


def test_a_model_that_may_be_there_unseen_is_said_to_be_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = b"[" * 3000 + b"]" * 3000
    assert read(b'{"x":' + deep + b',"y":1}').unread
    assert not read(b'{"x":' + deep + b',"model":"m"}').unread
    assert not read({"messages": []}).unread
    multipart = {"content-type": "multipart/form-data; boundary=xYz"}
    named = b'Content-Disposition: form-data; name="model"\r\n\r\nm'
    other = b'Content-Disposition: form-data; name="x"\r\n\r\n1'
    assert not read(form(named), AUDIO, multipart).unread
    assert read(form(other), AUDIO, multipart).unread
    assert read(form(named, *[other] * 70), AUDIO, multipart).unread
    assert read(form(named)[:-6], AUDIO, multipart).unread


def test_the_boundary_is_the_parameter_of_that_name() -> None:
    named = b'Content-Disposition: form-data; name="model"\r\n\r\nm'
    kind = 'multipart/form-data; x-boundary=a; charset="b";boundary=xYz'
    assert read(form(named), AUDIO, {"content-type": kind}).model == "m"


def test_anthropic_clients_are_known_on_shared_paths_by_their_header() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    assert parse(head("/v1/models", headers, "GET"), None).dialect is Dialect.ANTHROPIC
    assert parse(head("/unknown", headers), None).dialect is Dialect.ANTHROPIC
    assert parse(head("/v1/messages", {}), None).dialect is Dialect.ANTHROPIC
    assert parse(head(CHAT, headers), None).dialect is Dialect.OPENAI


def form(*parts: bytes, boundary: bytes = b"xYz") -> bytes:
    return (
        b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"
    )


FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper/large'
FORM = {"content-type": 'multipart/form-data; boundary="xYz"'}
AUDIO = "/v1/audio/transcriptions"


@pytest.mark.parametrize("order", [0, 1])
def test_an_uploads_model_is_found_before_or_after_its_file(order: int) -> None:
    sound = FILE + bytes(range(256)) * 4096 + b'\r\nname="model"\r\n\r\nfake'
    parts = [MODEL, sound] if order == 0 else [sound, MODEL]
    request = read(form(*parts, b"content-disposition: form-data; name=stream\r\n\r\ntrue"), AUDIO, FORM)
    assert (request.api, request.model, request.stream) == (Api.AUDIO, "whisper/large", True)
    assert request.model_span is None


def test_an_uploads_preamble_is_skipped() -> None:
    headers = {"content-type": "multipart/form-data; boundary=xYz"}
    assert read(b"preamble\r\n" + form(MODEL), AUDIO, headers).model == "whisper/large"


@pytest.mark.parametrize(
    "body",
    [
        form(b'Content-Disposition: form-data; name="model"; filename="m"\r\n\r\nfake'),
        form(b'Content-Disposition: form-data; name="models"\r\n\r\nfake'),
        form(b'Content-Disposition: form-data; xname="model"\r\n\r\nfake'),
        form(b'Content-Disposition: form-data; name="model"\r\n\r\n' + b"x" * 2000),
        form(b'Content-Disposition: form-data; name="model"\r\n\r\n\xff'),
        form(b"X: " + b"x" * 9000 + b"\r\n" + MODEL),
        form(*[b"X: y\r\n\r\n"] * 100, MODEL),
        form(MODEL, boundary=b"other"),
        form(MODEL)[:-20],
        b"--xYz",
        b"no form at all",
    ],
)
def test_an_upload_without_a_readable_model_goes_to_the_default_pool(body: bytes) -> None:
    assert read(body, AUDIO, FORM).model is None


def test_raw_audio_is_not_read() -> None:
    assert read(b"RIFF....", AUDIO, {"content-type": "audio/wav"}).model is None


KINDS = ("text", "tool_use", "tool_result", "thinking", "message", "function_call", "reasoning", "zzz")
INNER = (
    "type",
    "text",
    "content",
    "role",
    "tool_calls",
    "function",
    "function_call",
    "name",
    "arguments",
    "id",
)
INNER += ("input", "output", "thinking", "refusal", "cache_control", "reasoning", "user_id")
OUTER = (
    "model",
    "stream",
    "max_tokens",
    "tools",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "query",
)
OUTER += ("queries", "documents", "text_1", "text_2", "session_id", "conversation", "user", "metadata")
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(INNER), inner, max_size=5),
    max_leaves=15,
)
bodies = st.dictionaries(st.sampled_from(OUTER), json_values, max_size=6)
CONTENT_TYPES = st.sampled_from(["application/json", "multipart/form-data; boundary=a", "", "x"])
DAMAGE = st.binary(min_size=1, max_size=3) | st.sampled_from(
    [b"NaN", b'"model":"x",', b"\\ud800", b"\\", b'"', b"\xff"]
)


@given(bodies, st.sampled_from(PATHS))
def test_any_json_object_is_routed(body: dict[str, object], path: str) -> None:
    request = read(body, path)
    assert request.prompt.size == sum(map(len, request.prompt.pieces)) or request.prompt.token_ids
    assert request.body_size > 0


@given(st.binary(max_size=80), st.sampled_from(PATHS), CONTENT_TYPES)
def test_any_bytes_are_read_or_refused(body: bytes, path: str, content_type: str) -> None:
    with contextlib.suppress(BadRequest):
        parse(head(path, {"content-type": content_type}), body)


@given(bodies, st.sampled_from(PATHS), DAMAGE, st.data())
def test_damaged_json_is_read_just_as_python_reads_it(
    body: dict[str, object], path: str, damage: bytes, data: st.DataObject
) -> None:
    raw = json.dumps({"model": "m", **body}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    at = data.draw(st.integers(0, len(raw)))
    raw = raw[:at] + damage + raw[at:]
    try:
        expected = json.loads(raw)
    except ValueError:
        with contextlib.suppress(BadRequest):
            parse(head(path), raw)
        return
    request = parse(head(path), raw)
    name = expected.get("model")
    if not isinstance(name, str) or not name:
        assert request.model is None
    elif name.isascii():
        assert request.model == name
        assert request.model_span is not None
        renamed = json.loads(splice(raw, request.model_span, "n"))
        assert json.dumps(renamed) == json.dumps({**expected, "model": "n"})


@given(st.binary(max_size=60), st.sampled_from(["--a", "\r\n--a", "--a\r\n", 'name="model"', "\r\n\r\n"]))
def test_any_form_is_read(body: bytes, mark: str) -> None:
    text = b"--a\r\nContent-Disposition: form-data;" + mark.encode() + body + mark.encode()
    read(text, AUDIO, {"content-type": "multipart/form-data; boundary=a"})


def test_a_brief_reading_keeps_model_span_and_size_but_no_prompt() -> None:
    body = b'{"messages":[{"role":"user","content":"hello there"}],"model":"m","stream":true}'
    request = parse(RequestHead("r", "POST", "/v1/chat/completions", "", {}), body, brief=True)
    assert (request.model, request.stream, request.prompt.pieces) == ("m", True, ())
    assert request.prompt.size == len(body)
    assert request.model_span is not None
    assert body[slice(*request.model_span)] == b'"m"'
