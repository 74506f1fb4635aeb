"""GPU use from dcgm-exporter: what the page says, what it does not say, and where it is shown."""

from __future__ import annotations

import pytest

from extproc.config.clusters import read_clusters
from extproc.config.problem import ConfigError
from extproc.config.yaml_source import read
from extproc.engines import dcgm
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.telemetry.fleet_report import fleet_report
from extproc.telemetry.metrics import Metrics

PAGE = """\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-604ac76c",device="nvidia0",modelName="NVIDIA H100",Hostname="n1"} 1980
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-604ac76c",device="nvidia0",modelName="NVIDIA H100",Hostname="n1"} 37
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-11aa22bb",device="nvidia1",modelName="NVIDIA H100",Hostname="n1"} 92
DCGM_FI_DEV_GPU_UTIL{gpu="2",UUID="GPU-33cc44dd",device="nvidia2",modelName="NVIDIA H100",Hostname="n1"} 0
DCGM_FI_DEV_MEM_COPY_UTIL{gpu="0",UUID="GPU-604ac76c",device="nvidia0",modelName="NVIDIA H100"} 99
"""


def use(text: str, *gpus: str) -> float | None:
    return dcgm.gpu_utilization(dcgm.read(text), gpus)


def series(value: str, gpu: int = 0) -> str:
    return f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",UUID="GPU-{gpu}"}} {value}\n'


def test_the_busiest_gpu_of_the_page_counts() -> None:
    assert use(PAGE) == 0.92


def test_gpus_are_chosen_by_number_or_by_uuid() -> None:
    assert use(PAGE, "0") == 0.37
    assert use(PAGE, "GPU-604ac76c", "2") == 0.37


def test_an_idle_gpu_is_zero() -> None:
    assert use(PAGE, "2") == 0.0


def test_a_gpu_that_is_not_on_the_page_is_unknown() -> None:
    assert use(PAGE, "7") is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "2147483632", "9223372036854775792", "idle"])
def test_a_value_that_says_nothing_is_unknown_and_leaves_the_other_gpus(value: str) -> None:
    assert use(series(value)) is None
    assert use(series(value) + series("12", gpu=1)) == 0.12


def test_the_zero_that_exporters_write_for_a_mig_instance_is_unknown() -> None:
    assert use('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",GPU_I_PROFILE="1g.5gb",GPU_I_ID="7"} 0\n') is None


@pytest.mark.parametrize("text", ["", "<html>502</html>", "DCGM_FI_DEV_MEM_COPY_UTIL 5\n"])
def test_a_page_without_the_series_is_unknown(text: str) -> None:
    assert use(text) is None


def endpoint_told(value: float, at: float) -> Endpoint:
    endpoint = Endpoint(EndpointSpec("c", "10.0.0.1:8000", "chat"), 0)
    endpoint.gpu_utilization, endpoint.gpu_utilization_at = value, at
    return endpoint


def test_a_value_is_unknown_after_thirty_seconds() -> None:
    endpoint = endpoint_told(0.5, at=100.0)
    assert endpoint.gpu_utilization_known(130.0) == 0.5
    assert endpoint.gpu_utilization_known(130.5) is None


def test_the_fleet_report_has_the_use_and_its_age() -> None:
    (row,) = fleet_report([endpoint_told(0.0, at=100.0)], 104.0)
    assert (row["gpu_utilization"], row["gpu_utilization_age_s"]) == (0.0, 4.0)
    (row,) = fleet_report([endpoint_told(0.5, at=100.0)], 160.0)
    assert (row["gpu_utilization"], row["gpu_utilization_age_s"]) == (None, 60.0)


def test_an_endpoint_nobody_told_of_reports_unknown() -> None:
    (row,) = fleet_report([Endpoint(EndpointSpec("c", "10.0.0.1:8000", "chat"), 0)], 100.0)
    assert (row["gpu_utilization"], row["gpu_utilization_age_s"]) == (None, None)


def test_the_metric_has_a_series_only_where_the_use_is_known() -> None:
    endpoint = endpoint_told(0.25, at=100.0)
    lines = {
        now: [
            line
            for line in Metrics({endpoint.key: endpoint}, lambda now=now: now, process=False)
            .page()
            .decode()
            .splitlines()
            if line.startswith("extproc_endpoint_gpu_utilization{")
        ]
        for now in (101.0, 200.0)
    }
    assert lines == {
        101.0: ['extproc_endpoint_gpu_utilization{endpoint="c/10.0.0.1:8000",pool="chat"} 0.25'],
        200.0: [],
    }


CLUSTER = """
resources:
- name: a
  type: STATIC
  metadata: {{filter_metadata: {{extproc: {{pool: p, {said}}}}}}}
  load_assignment:
    cluster_name: a
    endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 10.0.0.1, port_value: 80}}}}}}}}]}}]
"""


def declared(said: str) -> EndpointSpec:
    (spec,) = read_clusters(read(CLUSTER.format(said=said), "clusters.yaml")).endpoints
    return spec


def test_the_metadata_names_the_page_and_the_gpus() -> None:
    spec = declared("dcgm_url: 'http://10.0.0.1:9400/metrics', dcgm_gpus: [0, GPU-11aa22bb]")
    assert spec.dcgm_url == "http://10.0.0.1:9400/metrics"
    assert spec.dcgm_gpus == ("0", "GPU-11aa22bb")


def test_without_the_keys_there_is_no_page() -> None:
    spec = declared("model: m")
    assert (spec.dcgm_url, spec.dcgm_gpus) == (None, ())


@pytest.mark.parametrize(
    "said",
    [
        "dcgm_url: 10.0.0.1:9400/metrics",
        "dcgm_url: 'ftp://10.0.0.1/metrics'",
        "dcgm_url: 'http:///metrics'",
        "dcgm_url: 'http://10.0.0.1:99999/metrics'",
        "dcgm_url: 'http://user:word@10.0.0.1/metrics'",
        "dcgm_url: 'http://10.0.0.1/me trics'",
        "dcgm_url: 9400",
        "dcgm_gpus: []",
        "dcgm_gpus: [true]",
        "dcgm_gpus: {0: 1}",
    ],
)
def test_what_is_no_page_or_no_gpu_is_refused_with_its_key(said: str) -> None:
    with pytest.raises(ConfigError) as error:
        declared(said)
    assert f"`{said.split(':')[0]}` must be" in str(error.value)
