"""``python -m extproc.simulator``: one simulated engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import fields, replace

import msgspec
import zmq

from extproc.simulator.faults import Faults
from extproc.simulator.kv_wire import KvWire
from extproc.simulator.options import Options
from extproc.simulator.presets import PRESETS
from extproc.simulator.profile import Profile
from extproc.simulator.server import serve


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m extproc.simulator", description="A simulated vLLM engine. See docs/simulator.md."
    )
    add = parser.add_argument
    defaults = Options()
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free port; it is printed either way")
    add("--model", default="sim")
    add("--preset", choices=sorted(PRESETS), default="demo")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="change one field of the profile")
    add(
        "--adapter", action="append", default=[], metavar="NAME", help="serve a LoRA adapter; may be repeated"
    )
    add("--max-model-len", type=int, help="default: what the KV cache holds")
    add(
        "--output-tokens",
        type=int,
        default=defaults.output_tokens,
        help="length of replies without max_tokens",
    )
    add("--chunk-tokens", type=int, default=defaults.chunk_tokens, help="tokens in an SSE event")
    add("--tick-ms", type=float, default=defaults.tick_s * 1000, help="how often streams are looked at")
    add(
        "--keepalive-s", type=float, default=defaults.keepalive_s, help="idle connections are closed after it"
    )
    add("--kv-events-port", type=int, metavar="PORT", help="publish KV events by ZeroMQ; 0 takes a free port")
    add("--kv-replay-port", type=int, default=0, metavar="PORT")
    add("--kv-wire", choices=[wire.value for wire in KvWire], default=KvWire.MAPS.value)
    add("--control-port", type=int, metavar="PORT", help="a listener for /_sim/ that faults do not touch")
    add("--record", type=int, default=0, metavar="N", help="keep the last N requests for /_sim/requests")
    add("--seed", type=int, default=0)
    add("--fault", action="append", default=[], metavar="NAME=VALUE", help="start with a fault switched on")
    return parser


def _profile(preset: str, changes: list[str]) -> Profile:
    """The preset with single fields changed.

    Raises:
        ValueError: no such field, or a value it cannot have.
    """
    profile = PRESETS[preset]
    kinds = {one.name: type(getattr(profile, one.name)) for one in fields(Profile)}
    values: dict[str, float] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise ValueError(f"--set {name}: no such field; there are {', '.join(kinds)}")
        values[name] = kinds[name](value)
    return replace(profile, **values)  # type: ignore[arg-type]


def _faults(switches: list[str]) -> Faults:
    """The switches of the command line; a bare name is true.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: no such switch, or a value it cannot have.
    """
    faults = Faults()
    for switch in switches:
        name, _, value = switch.partition("=")
        faults = faults.changed(b"{%s:%s}" % (msgspec.json.encode(name), (value or "true").encode()))
    return faults


async def _run(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    options = Options(
        adapters=tuple(args.adapter),
        kv_events_port=args.kv_events_port,
        kv_replay_port=args.kv_replay_port,
        kv_wire=KvWire(args.kv_wire),
        control_port=args.control_port,
        record=args.record,
        output_tokens=args.output_tokens,
        chunk_tokens=args.chunk_tokens,
        max_model_len=args.max_model_len,
        tick_s=args.tick_ms / 1000,
        keepalive_s=args.keepalive_s,
        seed=args.seed,
        faults=_faults(args.fault),
    )
    handle = await serve(_profile(args.preset, args.set), args.model, args.host, args.port, options)
    try:
        print(f"listening on {args.host}:{handle.port}", flush=True)
        if handle.control_port is not None:
            print(f"control on {args.host}:{handle.control_port}", flush=True)
        if handle.kv is not None:
            print(f"kv events on {handle.kv.endpoint} replay on {handle.kv.replay_endpoint}", flush=True)
        await stopped.wait()
    finally:
        await handle.stop()


def main() -> None:
    """Serve until SIGINT or SIGTERM; one line and exit code 1 when that cannot be done."""
    args = _parser().parse_args()
    try:
        asyncio.run(_run(args))
    except (OSError, ValueError, msgspec.MsgspecError, zmq.ZMQError) as error:
        sys.exit(f"simulator: {error}")


if __name__ == "__main__":
    main()
