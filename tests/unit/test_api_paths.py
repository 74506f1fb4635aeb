"""Paths: which API, whose dialect, who answers."""

from __future__ import annotations

import pytest

from extproc.api.paths import classify, model_id, own_answer
from extproc.api.request import Api, Dialect


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/chat/completions", Api.CHAT),
        ("/v1/chat%2Fcompletion%73", Api.CHAT),
        ("/openai/v1/chat/completions", Api.CHAT),
        ("/openai/deployments/gpt/chat/completions", Api.CHAT),
        ("/v1/chat/completions/", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/completions", Api.COMPLETIONS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/pooling", Api.EMBEDDINGS),
        ("/classify", Api.EMBEDDINGS),
        ("/rerank", Api.RERANK),
        ("/v1/rerank", Api.RERANK),
        ("/v2/rerank", Api.RERANK),
        ("/score", Api.SCORE),
        ("/v1/score", Api.SCORE),
        ("/tokenize", Api.TOKENIZE),
        ("/detokenize", Api.TOKENIZE),
        ("/v1/audio/transcriptions", Api.AUDIO),
        ("/v1/audio/translations", Api.AUDIO),
        ("/v1/audio/speech", Api.AUDIO),
        ("/v1/chat/completions/render", Api.OTHER),
        ("/v1/threads/t1/messages", Api.OTHER),
        ("/mychat-completions", Api.OTHER),
        ("/generate", Api.OTHER),
        ("/", Api.OTHER),
        ("", Api.OTHER),
        ("*", Api.OTHER),
    ],
)
def test_the_ending_of_a_posted_path_decides(path: str, api: Api) -> None:
    assert classify("POST", path) == (api, Dialect.OPENAI)


@pytest.mark.parametrize("prefix", ["/v1", "", "/anthropic/v1"])
def test_messages_speak_anthropic(prefix: str) -> None:
    path = prefix + "/messages"
    assert classify("POST", path) == (Api.MESSAGES, Dialect.ANTHROPIC)


def test_counting_tokens_generates_none() -> None:
    assert classify("POST", "/v1/messages/count_tokens") == (Api.TOKENIZE, Dialect.ANTHROPIC)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/models/m"),
        ("POST", "/v1/models"),
        ("GET", "/v2/models/m/ready"),
        ("GET", "/health/live"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
def test_everything_else_passes_through(method: str, path: str) -> None:
    assert classify(method, path)[0] is Api.OTHER
    assert own_answer(method, path) is None


@pytest.mark.parametrize(
    "path", ["/v1/models", "/models", "/openai/v1/models", "/v1/models/a", "/v1/models/a/b"]
)
def test_the_gateway_answers_for_models(path: str) -> None:
    assert own_answer("GET", path) is Api.MODELS


def test_the_gateway_answers_for_its_health() -> None:
    assert own_answer("GET", "/health") is Api.HEALTH
    assert own_answer("HEAD", "/health") is Api.HEALTH
    assert own_answer("POST", "/health") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", None),
        ("/v1/models/", None),
        ("/v1/models/llama", "llama"),
        ("/models/llama", "llama"),
        ("/v1/models/meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/v1/models/meta-llama%2FLlama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/v1/models/gpt-oss:120b", "gpt-oss:120b"),
        ("/v1/models/%ff", "\ufffd"),
        ("/health", None),
    ],
)
def test_a_model_is_asked_for_by_its_opaque_id(path: str, name: str | None) -> None:
    assert model_id(path) == name
