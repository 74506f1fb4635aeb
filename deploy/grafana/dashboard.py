"""The Grafana dashboard, made from ``rows.py`` with Grafana's own builders, so that its JSON is never edited by hand.

python -m deploy.grafana.dashboard            write dashboard.json
"""

from __future__ import annotations

import itertools
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

from deploy.grafana.rows import ROWS, Graph

FILE = Path(__file__).with_name("dashboard.json")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")


def build() -> dashboards.Dashboard:
    """The whole dashboard."""
    made = (
        dashboards.Dashboard("extproc: LLM gateway")
        .uid("extproc")
        .tags(["extproc", "llm"])
        .description("What the gateway decides, how the engines are, what clients get.")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboards.DatasourceVariable("source").label("Source").type("prometheus"))
        .with_variable(
            dashboards.QueryVariable("pool")
            .label("Pool")
            .query("label_values(extproc_pool_metrics_stale, pool)")
            .datasource(_SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            # Not the list of pools: requests that were refused before they had one are shown too.
            .all_value(".*")
        )
    )
    numbers = itertools.count(1)
    for row in ROWS:
        made = made.with_row(dashboards.Row(row.title).id(next(numbers)))
        for graph in row.graphs:
            made = made.with_panel(_panel(graph).id(next(numbers)))
    return made


def _panel(graph: Graph) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(graph.title)
        .description(graph.text)
        .datasource(_SOURCE)
        .unit(graph.unit)
        .min(0)
        .span(8)
        .height(8)
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(30 if graph.stacked else 5)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if graph.stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("all"))
    for letter, (expression, legend) in zip("ABCDEFGH", graph.queries, strict=False):
        panel = panel.with_target(
            prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).range()
        )
    return panel


def render() -> str:
    """The JSON that Grafana loads."""
    return JSONEncoder(sort_keys=True, indent=1).encode(build().build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
