"""A trace's request in the forms that the core and the engines take.

The core gets bytes, as in production: each run of a prompt is a repetition of its name, as many bytes as its tokens
have at ``bytes_per_token``. So the core hashes, estimates tokens and learns bytes per token with its own code. The
engine gets names of its own, finer or coarser blocks.
"""

from __future__ import annotations

from extproc.api.request import Api, InferenceRequest, Prompt, RequestHead
from extproc.replay.arrival import Arrival
from extproc.simulator.job import Job

MODEL = "replayed"


_NAME = 0xFFFFFFFFFFFFFFFF


def request_of(arrival: Arrival, bytes_per_token: float = 4.0) -> InferenceRequest:
    """What the edge would have parsed."""
    size = int(arrival.block_tokens * bytes_per_token)
    length = max(int(arrival.prompt_tokens * bytes_per_token), 1)
    names = arrival.blocks[: -(-arrival.prompt_tokens // arrival.block_tokens)]
    copies, rest = divmod(size, 8)
    pieces = [(name & _NAME).to_bytes(8, "little") * copies for name in names]
    if rest:
        pieces = [piece + piece[:rest] for piece in pieces]
    spare = size * len(pieces) - length
    if spare > 0:
        pieces[-1] = pieces[-1][:-spare]
    return InferenceRequest(
        RequestHead(arrival.id, "POST", "/v1/chat/completions", "", {}),
        api=Api.CHAT,
        model=arrival.adapter or MODEL,
        stream=arrival.stream,
        prompt=Prompt(tuple(pieces), size=length),
        session=arrival.session,
        body_size=length,
    )


def job_of(arrival: Arrival, block_size: int) -> Job:
    """What an engine with blocks of ``block_size`` tokens is asked to do."""
    names, run = arrival.blocks, arrival.block_tokens
    # Content is named as far as the trace tells: to the prompt's end, or past it where the answer is named too.
    named = len(names) * run
    told = arrival.prompt_tokens if named - arrival.prompt_tokens < run else named
    blocks = min(told, arrival.prompt_tokens + arrival.output_tokens) // block_size
    if run % block_size == 0:
        part = run // block_size
        hashes = [name * part + at for name in names[: -(-blocks // part)] for at in range(part)][:blocks]
    elif block_size % run == 0:
        part = block_size // run
        hashes = list(names[part - 1 : blocks * part : part])
    else:
        ends = range(block_size - 1, blocks * block_size, block_size)
        hashes = [names[end // run] * run + end % run for end in ends]
    return Job(arrival.id, hashes, arrival.prompt_tokens, arrival.output_tokens, arrival.adapter)
