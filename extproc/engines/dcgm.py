"""The metrics page of NVIDIA's dcgm-exporter: how busy the GPUs of a host are.

``DCGM_FI_DEV_GPU_UTIL`` is the share of time in which any kernel ran, in percent, one series a GPU with labels ``gpu``
(its number) and ``UUID``. DCGM writes a huge number (``DCGM_INT32_BLANK``, 0x7ffffff0 and above) for a value that it has
not: what is above 100 says nothing. Nor do series of MIG instances (label ``GPU_I_ID``), for which it does not know the
value and some exporters write 0 (https://github.com/NVIDIA/dcgm-exporter/issues/216).
"""

from __future__ import annotations

from collections.abc import Collection

from extproc.engines.scan import Page, Scanner

_UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"
_SCANNER = Scanner([_UTILIZATION])


def read(text: str) -> Page:
    """The page, kept to what :func:`gpu_utilization` needs. Never raises on any text."""
    return _SCANNER.scan(text)


def gpu_utilization(page: Page, gpus: Collection[str] = ()) -> float | None:
    """Use of the busiest of ``gpus`` (numbers or UUIDs; none given: of all), 0..1; None where the page does not say."""
    told = [
        sample.value / 100.0
        for sample in page.of(_UTILIZATION)
        if sample.value <= 100.0
        and not sample.labels.get("GPU_I_ID")
        and (not gpus or sample.labels.get("gpu") in gpus or sample.labels.get("UUID") in gpus)
    ]
    return max(told, default=None)
