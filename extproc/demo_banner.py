"""What ``extproc demo`` says when all parts run: addresses, and a request to try."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from extproc.fleet_commands import DEFAULT_ADMIN


def banner(*, port: int, admin_port: int, folder: Path, model: str) -> list[str]:
    """Lines to copy from: with model names of usual length none is longer than 80 columns, and the shell takes the
    request as it stands.
    """
    admin = f"127.0.0.1:{admin_port}"
    elsewhere = "" if DEFAULT_ADMIN.endswith(f"//{admin}") else f" --admin {admin}"
    return [
        f"gateway http://127.0.0.1:{port}, admin http://{admin}",
        f"files in {folder}; Ctrl-C stops everything",
        "",
        f"  curl -iN http://127.0.0.1:{port}/v1/chat/completions \\",
        f"    -H 'content-type: application/json' -d '{{\"model\": {json.dumps(model)},",
        # Long enough for a few blocks of a cache, short enough for any model.
        """    "stream": true, "max_tokens": 50, "messages": [{"role": "user", "content":""",
        """    "Add up: '"$(seq -s ' ' 500)"'"}]}'""",
        "",
        "Send it twice: the second goes where its prompt is cached. This says why (ID is",
        "the x-gateway-request-id that curl shows):",
        "",
        f"  {_command()} explain ID{elsewhere}",
    ]


def _command() -> str:
    """How to call ``extproc`` from the same folder."""
    beside, here = Path(sys.executable).parent / "extproc", Path.cwd()
    if shutil.which("extproc") == str(beside):
        return "extproc"
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
