"""extproc: an LLM inference gateway. Envoy moves the bytes; this package decides, accounts and learns.

Rooms, from the edge inwards: ``cli`` starts things, ``gateway`` wires them, ``edge`` owns every socket, file and clock;
everything else is a core without input or output, driven by events and ``now`` (monotonic seconds).
"""

__version__ = "0.1.0"
