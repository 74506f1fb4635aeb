"""The model's value is replaced in the raw bytes, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.parse import parse
from extproc.api.request import InferenceRequest, RequestHead
from extproc.api.splice import find_model, splice

HEAD = RequestHead("id", "POST", "/v1/chat/completions", "", {"content-type": "application/json"})


def read(body: bytes) -> InferenceRequest:
    return parse(HEAD, body)


def respell(body: bytes, name: str = "new") -> bytes:
    span = read(body).model_span
    assert span is not None
    return splice(body, span, name)


def test_every_other_byte_stays() -> None:
    body = (
        b'{ "seed":9007199254740993,\t"temperature":1e-7 , "top_p":1.0,"user":"\\u00e9\\/",\r\n'
        b'"model" : "alias" ,"z":1,"a":-0.0,"messages":[{"content":"h\\u0069","role":"user"}], "z":2}\n'
    )
    assert respell(body, "real") == body.replace(b'"alias"', b'"real"')


@pytest.mark.parametrize(
    "name", ["a/b", "gpt-oss:120b", "org/adapter@v1", "with space", 'quo"te', "모델", "\n\\"]
)
def test_names_are_opaque(name: str) -> None:
    assert json.loads(respell(b'{"model":"x"}', name)) == {"model": name}
    body = json.dumps({"model": name}).encode()
    assert read(body).model == name
    assert respell(body) == b'{"model": "new"}'


@pytest.mark.parametrize(
    "before",
    [
        b'"messages":[{"role":"user","content":"say \\"model\\":\\"alias\\" and \\"alias"}]',
        b'"user":"alias"',
        b'"metadata":{"model":"alias"}',
        b'"tools":[{"model":"alias"}]',
        b'"x":["model","alias"]',
        b'"x":"model","alias":"alias"',
        b'"x":"model\\\\","y":"\\\\\\"model\\":"',
        b'"model":"alias"',
        b'"model":["alias"]',
    ],
)
def test_look_alikes_before_and_after_are_left_alone(before: bytes) -> None:
    body = b"{" + before + b', "model": "alias"}'
    assert respell(body) == body[: -len(b'"alias"}')] + b'"new"}'
    if not before.startswith(b'"model"'):
        body = b'{"model": "alias",' + before + b"}"
        assert respell(body) == b'{"model": "new",' + before + b"}"


@pytest.mark.parametrize("key", [b"mod\\u0065l", b"\\u006d\\u006F\\u0064\\u0065\\u006c", b"model"])
def test_an_escaped_key_is_the_same_key(key: bytes) -> None:
    for extra in (b"", b'"user":"alias",'):
        body = b"{" + extra + b'"' + key + b'" : "alias"}'
        assert respell(body) == body.replace(b': "alias"', b': "new"')


def test_the_last_of_duplicate_keys_wins_as_in_the_engine() -> None:
    body = b'{"model":"a","messages":[],"model":"b"}'
    assert read(body).model == "b"
    assert respell(body) == b'{"model":"a","messages":[],"model":"new"}'


def test_a_last_duplicate_that_is_no_string_leaves_nothing_to_splice() -> None:
    request = read(b'{"model":"a","model":null}')
    assert request.model is None
    assert request.model_span is None
    assert find_model(b'{"model":"a","model":null}') is None


def test_a_model_called_model() -> None:
    assert respell(b'{"model":"model"}') == b'{"model":"new"}'
    assert respell(b'{"model":"\\u006dodel"}') == b'{"model":"new"}'


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"user":"alias","model":"alias"}',
        b'{"user":"alias","model":"alias","temperature":NaN}',
        b'{"user":"alias","model":"alias","x":"\\ud800"}',
        b'{"user":"alias","model":"alias","x":"\xff"}',
        b'{"user":"alias","model":"alias","x":' + b"[" * 3000 + b"]" * 3000 + b"}",
    ],
)
def test_bodies_only_python_reads_are_spliced_in_place_too(body: bytes) -> None:
    assert respell(body) == body.replace(b'"model":"alias"', b'"model":"new"')


def test_utf_16_is_routed_but_has_no_span() -> None:
    request = read('{"model":"alias"}'.encode("utf-16"))
    assert (request.model, request.model_span) == ("alias", None)


@pytest.mark.parametrize(
    "body", [b'{"model":"a', b'{"model":"a\\', b'{"model":"a\\"' + b'\\"' * 200_000, b'"']
)
def test_a_string_without_an_end_is_walked_once(body: bytes) -> None:
    find_model(body)


def test_a_body_of_millions_of_strings_is_given_up() -> None:
    assert find_model(b'{"x":[' + b'"",' * 600_000 + b'""],"model":"m"}') is None
    assert read(b'{"x":[' + b'"",' * 600_000 + b'""],"model":"m"}').model_span is not None


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
words = st.sampled_from(
    ["model", "alias", '"model":"alias"', '{"model": "alias"}', 'alias"', "\\", "mod\\u0065l"]
)
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(), inner, max_size=4),
    max_leaves=12,
)
spaces = st.text(alphabet=" \t\r\n", max_size=3)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A JSON object before and after its model is renamed: the expected result is built, not parsed."""
    members = draw(st.lists(st.tuples(words | st.text(), values), max_size=5))
    name = draw(words | st.text(min_size=1).filter(lambda text: text.strip("\x00") != ""))
    at = draw(st.integers(0, len(members)))
    ascii_only = draw(st.booleans())
    parts: list[tuple[str, str, str]] = []
    for index, (key, value) in enumerate([*members[:at], ("model", name), *members[at:]]):
        if key == "model" and index > at:
            continue
        written = json.dumps(value, ensure_ascii=ascii_only)
        spelled = json.dumps(key, ensure_ascii=ascii_only)
        if key == "model" and draw(st.booleans()):
            spelled = '"\\u006dodel"'
        lead = draw(spaces) + spelled + draw(spaces) + ":" + draw(spaces)
        parts.append((lead, written, '"new"' if index == at else written))
    tail = draw(spaces)
    before = "{" + ",".join(lead + old + tail for lead, old, _ in parts) + "}"
    after = "{" + ",".join(lead + new + tail for lead, _, new in parts) + "}"
    return before.encode("utf-8", "surrogatepass"), after.encode("utf-8", "surrogatepass")


@given(objects())
def test_any_object_differs_only_in_the_models_value(pair: tuple[bytes, bytes]) -> None:
    before, after = pair
    assert respell(before) == after


@given(objects())
def test_walking_the_keys_finds_what_the_quick_search_finds(pair: tuple[bytes, bytes]) -> None:
    assert find_model(pair[0]) == read(pair[0]).model_span
