"""A model of an inference engine in virtual time, and its HTTP front.

The model (``engine``, ``profile``, ``presets``, ``job``, ``events``, ``blocks``, ``batch``, ``step``,
``adapters``) has no clock and no socket: time comes in as ``now``, and it tells when it next has something
to say. ``replay`` drives it as fast as it goes. The front (``server`` and what it imports: ``pump``,
``http_*``, ``kv_publisher`` …) drives it by the event loop's clock and speaks vLLM's HTTP, metrics and
KV-event dialects: ``python -m extproc.simulator --help``.
"""
